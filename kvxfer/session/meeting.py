"""How an agent meets its peers: it connects to them, and accepts those that call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.arguments import check_kind
from kvxfer.directory.entry import Entry
from kvxfer.peer import Peer
from kvxfer.region import RegionDescriptor
from kvxfer.session.accepting import Accepting
from kvxfer.session.connecting import Connecting

if TYPE_CHECKING:
    from kvxfer._native import AgentCore
    from kvxfer.options import AgentOptions
    from kvxfer.session.completion import Completions
    from kvxfer.session.name_lookup import NameLookup
    from kvxfer.session.peer_table import PeerTable
    from kvxfer.session.region_table import RegionTable


class Meeting:
    """The verbs of `kvxfer.Agent` that begin sessions."""

    _core: AgentCore
    _completions: Completions
    _options: AgentOptions
    _names: NameLookup
    _peers: PeerTable
    _regions: RegionTable
    _entry: Entry

    async def connect(self, target: str | Entry | RegionDescriptor, timeout_s: float | None = None) -> Peer:
        """Opens a session with another agent, its rails and the list of its regions.

        Parameters
        ----------
        target
            ``"tcp://host:port"``, a name to look up in the directory, an agent's entry, or the descriptor of
            a region, for its owner. With whom the last three say the session is, or there is none; an entry
            or a descriptor returns the one that is open already. On one host the rails are shm and a unix
            socket all the same, and cuda_ipc where both ends name it.
        timeout_s
            For looking up and connecting together; None takes the options' ``connect_timeout_s``.

        Raises
        ------
        PeerError
            ``unreachable``, ``auth-failed``, ``protocol``, ``peer-lost``: the message says what was tried.
            ``peer-restarted``: another incarnation answered than the one that was meant.
        UsageError
            ``invalid-argument``: no address, a name and no directory, or an address beyond loopback and no
            secret. ``layout-mismatch``: a region that both ends call by one name holds caches that no copy
            program can bridge; the message compares them field by field. The session has ended.

        docs/errors.md has every code.
        """
        with self._connecting(target, timeout_s) as connecting:
            return await connecting.wait()

    def connect_blocking(
        self, target: str | Entry | RegionDescriptor, timeout_s: float | None = None
    ) -> Peer:
        """Opens a session with another agent: the blocking twin of `connect`."""
        with self._connecting(target, timeout_s) as connecting:
            return connecting.wait_blocking()

    def _connecting(self, target: str | Entry | RegionDescriptor, timeout_s: float | None) -> Connecting:
        return Connecting(
            self._core,
            self._completions,
            self._peers,
            self._regions,
            self._names,
            target,
            timeout_s,
            self._options.connect_timeout_s,
        )

    async def accept(self, name: str | None = None, timeout_s: float | None = None) -> Peer:
        """Waits until a peer is connected and returns it.

        Parameters
        ----------
        name
            The peer's name. Returns its newest session that is open, whichever side called, so also one that
            this agent dialled; any number of callers get the same. None takes the oldest open session that a
            peer has called for and that was returned to nobody yet, by a name or without: each goes to one
            caller, and those that this agent dialled to none.
        timeout_s
            None waits without bound.

        Raises
        ------
        UsageError
            ``invalid-argument``: `name` is no text.
        TimeoutError
            No such peer came in time.
        """
        return await self._accepting(name).wait(timeout_s)

    def accept_blocking(self, name: str | None = None, timeout_s: float | None = None) -> Peer:
        """Blocks until a peer is connected: the twin of `accept`."""
        return self._accepting(name).wait_blocking(timeout_s)

    def _accepting(self, name: str | None) -> Accepting:
        check_kind(name, "name", str | None, "a peer's name, or None for the next that calls")
        return Accepting(self._completions, self._peers, self._entry.name, self._entry.address, name)

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Peers that are connected, the newest session last."""
        return self._peers.open()
