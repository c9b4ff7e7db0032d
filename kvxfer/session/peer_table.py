"""The sessions of one agent, as one `Peer` object each."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, Any

from kvxfer._native import AgentCore, NativeError
from kvxfer.errors import AgentError, PeerError, translate
from kvxfer.peer import Peer, PeerState, loss_of, place_of_caller, session_with
from kvxfer.region_descriptor import RegionDescriptor
from kvxfer.session.completion import Completions
from kvxfer.session.stats import PeerStats

if TYPE_CHECKING:
    from kvxfer._native import Sender


class PeerTable:
    """Finds and keeps open peers. It holds only weak references to lost peers."""

    def __init__(self, core: AgentCore, completions: Completions, connect_timeout_s: float) -> None:
        self._core = core
        self._connect_timeout_s = connect_timeout_s
        self._completions = completions
        self._peers: dict[int, Peer] = {}
        # The same peers by the incarnation of their agent, in the order of `_order_of`; several if both ends
        # called.
        self._by_incarnation: dict[bytes, tuple[Peer, ...]] = {}
        self._num_remembered = 0
        self._by_address: dict[str, Peer] = {}  # those that this agent dialled
        self._lock = threading.Lock()  # for changes of all
        # A notification that is read after the loss of its peer still gets the Peer object that the program
        # holds.
        self._lost: weakref.WeakValueDictionary[int, Peer] = weakref.WeakValueDictionary()

    def _made(self, peer_id: int, info: dict[str, Any]) -> Peer:
        return Peer(self._completions, peer_id, info, self._connect_timeout_s)

    def open(self) -> tuple[Peer, ...]:
        """Returns connected peers, the newest session last."""
        self._completions.check()
        try:
            peer_ids = self._core.peers()
        except NativeError as error:
            raise translate(error) from None
        found = []
        for peer_id in sorted(peer_ids):
            peer = self.get(peer_id)
            if peer is not None and peer.state is PeerState.OPEN:
                found.append(peer)
        return tuple(found)

    def get(self, peer_id: int) -> Peer | None:
        """Returns the one object for a session; None while the peer's name is unknown."""
        peer = self._peers.get(peer_id) or self._lost.get(peer_id)
        if peer is None:
            try:
                info = self._core.peer(peer_id)
            except NativeError:
                return None  # lost and forgotten since it was listed
            if info["state"] == "connecting":
                return None
            if info["state"] == "lost":
                return self._lost.setdefault(peer_id, self._made(peer_id, info))
            peer = self._remember(peer_id, info)
        return peer

    def sender(self, peer_id: int, sender: Sender) -> Peer:
        """Returns the same for mail, whose session native code may have forgotten long ago."""
        peer = self._peers.get(peer_id) or self.get(peer_id)
        return peer or self._lost.setdefault(peer_id, self._made(peer_id, sender.info()))

    def budgets(self) -> list[PeerStats]:
        """Returns for each open session the peer's name, and its use of its budgets here."""
        found: list[PeerStats] = []
        for peer_id in sorted(self._core.peers()):
            try:
                info = self._core.peer(peer_id)
            except NativeError:
                continue  # it was lost meanwhile
            if "budget" in info:
                found.append({"name": info["name"], "budget": info["budget"]})
        return found

    def find(self, name: str) -> Peer | None:
        """Returns the open session with the agent of this name, and counts it as accepted."""
        peer = session_with([peer for peer in self.open() if peer.name == name], name)
        if peer is not None:
            peer._take()
        return peer

    def next_caller(self) -> Peer | None:
        """Returns the oldest open session that a peer opened and that no call has returned yet."""
        for peer in self.open():
            if peer._take():
                return peer
        return None

    def all_with(self, incarnation: bytes) -> tuple[Peer, ...]:
        """Returns the open sessions with this incarnation of an agent, the one to use first."""
        known = self._by_incarnation.get(incarnation, ())
        return tuple(peer for peer in known if peer.state is PeerState.OPEN)

    def first_with(self, incarnation: bytes | None, address: str) -> Peer | None:
        """Returns the session that ``connect`` gives for an agent, if one is open.

        None as `incarnation` stands for the agent that `address` has led to.
        """
        if incarnation is None:
            dialled = self._by_address.get(address)
            if dialled is None or dialled.state is not PeerState.OPEN:
                return None
            incarnation = dialled.incarnation
        elif incarnation not in self._by_incarnation:
            self.open()  # its session may have come up a moment ago, and its event may still be unread
        return self._first_open(incarnation)

    def owner_of(self, remote: RegionDescriptor) -> Peer:
        """Returns the session that ``connect`` gives for a descriptor's owner, or raises.

        Looks at that session only, however many are open.
        """
        if (peer := self._first_open(remote.incarnation)) is not None:
            return peer
        self.open()  # its session may have come up a moment ago, and its event may still be unread
        if (peer := self._first_open(remote.incarnation)) is not None:
            return peer
        raise PeerError(
            f"no session is open with the incarnation of {remote.agent} that owns region {remote.name!r}: "
            "connect to it first, with connect(descriptor)",
            code="unreachable",
            peer=remote.agent,
        )

    def settled(self, peer_id: int) -> bool:
        """Whether connecting has ended, in success or failure."""
        return bool(self._core.peer(peer_id)["state"] != "connecting")

    def opened(self, peer_id: int, target: str, address: str) -> Peer:
        """Returns the peer of a session that has settled, or raises why there is none.

        `target` is the caller's text for it; `address` is the dialled address.
        """
        info = self._core.peer(peer_id)
        if info["state"] != "open":
            raise loss_of(info, info["name"] or target)
        peer = self._remember(peer_id, info)
        with self._lock:
            peer._address = address
            if peer_id in self._peers:
                self._by_address[address] = peer
        return peer

    def forget(self, peer_id: int) -> None:
        """Drops a session that was lost."""
        with self._lock:
            peer = self._peers.pop(peer_id, None)
            if peer is not None:
                left = tuple(other for other in self._by_incarnation[peer.incarnation] if other is not peer)
                if left:
                    self._by_incarnation[peer.incarnation] = left
                else:
                    del self._by_incarnation[peer.incarnation]
                if self._by_address.get(peer.address) is peer:
                    del self._by_address[peer.address]
        if peer is not None:
            with contextlib.suppress(AgentError):  # closed meanwhile, while events that were left are read
                peer._info()  # fetches the reason of the loss while native code knows it
            self._lost[peer_id] = peer

    def clear(self) -> None:
        """Drops everything."""
        with self._lock:
            self._peers.clear()
            self._by_incarnation.clear()
            self._by_address.clear()

    # ---- inside -----------------------------------------------------------------------------

    def _first_open(self, incarnation: bytes) -> Peer | None:
        known = self._by_incarnation.get(incarnation, ())
        return next((peer for peer in known if peer.state is PeerState.OPEN), None)

    def _remember(self, peer_id: int, info: dict[str, Any]) -> Peer:
        """Returns the one object of an open session; makes it if there is none yet."""
        with self._lock:
            peer = self._peers.get(peer_id)
            if peer is None:
                peer = self._peers[peer_id] = self._made(peer_id, info)
                peer._order = self._order_of(peer, is_ours=info["is_ours"])
                known = (*self._by_incarnation.get(peer.incarnation, ()), peer)
                self._by_incarnation[peer.incarnation] = tuple(sorted(known, key=lambda each: each._order))
        return peer

    def _order_of(self, peer: Peer, *, is_ours: bool) -> tuple[int, int]:
        """Returns the place of a new session among those with its agent: by caller, then as they came up."""
        self._num_remembered += 1
        caller = place_of_caller(self._core.incarnation, peer.incarnation, is_ours=is_ours)
        return caller, self._num_remembered
