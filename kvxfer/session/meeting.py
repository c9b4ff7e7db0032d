"""The verbs by which an agent connects to peers and accepts peers that call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.arguments import check_kind
from kvxfer.directory.entry import Entry
from kvxfer.naming import check_name
from kvxfer.peer import Peer
from kvxfer.region_descriptor import RegionDescriptor
from kvxfer.session.accepting import Accepting
from kvxfer.session.connecting import Connecting

if TYPE_CHECKING:
    from kvxfer._native import AgentCore
    from kvxfer.options import AgentOptions
    from kvxfer.session.completion import Completions
    from kvxfer.session.dials import Dials
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
    _dials: Dials
    _regions: RegionTable
    _entry: Entry

    async def connect(self, target: str | Entry | RegionDescriptor, timeout_s: float | None = None) -> Peer:
        """Returns the session with another agent; opens it, its rails and the list of its regions if needed.

        An agent has one session with each incarnation of another, however many callers connect, at once or
        one after another: a request handler may connect for each request. Callers that ask at once share one
        attempt. Cancelling one of them leaves it to the others; when the last one leaves, it is given up. So
        `Peer.disconnect` ends the session for all who use it.

        Parameters
        ----------
        target
            ``"tcp://host:port"``, a name to look up in the directory, an agent's entry, or a region's
            descriptor, which stands for its owner. A name, an entry or a descriptor identifies the agent: the
            session is with that agent, or connecting fails. For an address it is the session with the agent
            that answered there before, while that is open. Between agents on one host the rails are shm and a
            unix socket whatever the address, and cuda_ipc if both ends name it.
        timeout_s
            Limit for looking up and connecting together; None takes the options' ``connect_timeout_s``.

        Raises
        ------
        PeerError
            ``unreachable``, ``no-answer`` (`NoAnswerError`, also a `TimeoutError`), ``auth-failed``,
            ``protocol``, ``peer-lost``: the message says what was tried.
            ``peer-restarted``: the agent that answered has another incarnation than `target`.
        UsageError
            ``invalid-argument``: `target` is not an address, is a name while the agent has no directory, or
            is beyond loopback while the agent has no secret. ``layout-mismatch``: both ends have a region of
            the same name, but no copy program can connect their caches. The message compares the layouts
            field by field. The session has ended.

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
            self._dials,
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
            The peer's name. The result is the newest open session with that peer, whether the peer called or
            this agent did; every caller gets the same one. None takes the oldest open session that a peer
            opened and that no `accept` has returned yet. Each such session goes to one caller. Sessions that
            this agent opened are skipped.
        timeout_s
            None waits without bound.

        Raises
        ------
        UsageError
            ``invalid-argument``: `name` is no name: text of 1 to 128 bytes in UTF-8.
        TimeoutError
            No such peer came in time.
        """
        return await self._accepting(name).wait(timeout_s)

    def accept_blocking(self, name: str | None = None, timeout_s: float | None = None) -> Peer:
        """Blocks until a peer is connected: the twin of `accept`."""
        return self._accepting(name).wait_blocking(timeout_s)

    def _accepting(self, name: str | None) -> Accepting:
        check_kind(name, "name", str | None, "a peer's name, or None for the next peer that calls")
        if name is not None:
            check_name(name, "name")
        return Accepting(self._completions, self._peers, self._entry.name, self._entry.address, name)

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Connected peers, the newest session last."""
        return self._peers.open()
