"""Another agent, as long as the session with it lasts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, AnyStr, Final

from kvxfer._native import CODES, NativeError
from kvxfer.arguments import check_kind, count
from kvxfer.errors import AgentError, KvxferError, PeerError, UsageError, from_code, listed, translate
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.message import MAX_MESSAGE_NBYTES
from kvxfer.region_descriptor import RegionDescriptor

if TYPE_CHECKING:
    from kvxfer.session.completion import Completions

#: Advice in errors about a peer of another agent.
OWN_PEER: Final = "pass a peer from this agent's connect(), accept() or peers"


class PeerState(StrEnum):
    """A session's state. Each member equals its word."""

    OPEN = "open"
    LOST = "lost"


class _Regions(dict[str, RegionDescriptor]):
    """A peer's regions by name. The error for an unknown name lists the known ones."""

    def __init__(self, peer_name: str) -> None:
        super().__init__()
        self._peer_name = peer_name

    def __missing__(self, name: str) -> RegionDescriptor:
        raise KeyError(
            f"{self._peer_name} has no region {name!r} now (it has: {listed(self, 'none')}): "
            "peer.region(name) waits until it is registered"
        )


class Peer:
    """One session with another agent. Made by ``agent.connect`` and ``agent.accept``.

    A peer that restarts, or connects again, is another `Peer`; leases, transfers and descriptors
    of this one end with it.
    """

    __slots__ = (
        "__weakref__",
        "_address",
        "_completions",
        "_connect_timeout_s",
        "_descriptors",
        "_id",
        "_identity",
        "_incarnation",
        "_lost",
        "_name",
        "_order",
        "_unaccepted",
    )

    def __init__(
        self, completions: Completions, peer_id: int, info: dict[str, Any], connect_timeout_s: float
    ) -> None:
        self._completions = completions
        self._connect_timeout_s = connect_timeout_s
        self._id = peer_id
        self._name = str(info["name"])
        self._incarnation = bytes(info["incarnation"])
        self._identity = str(info["identity"])
        self._address = ""
        self._descriptors: dict[int, RegionDescriptor] = {}
        # Holds one item until accept() has returned this peer; empty if this agent called, as accept() skips
        # it.
        self._unaccepted = [] if info["is_ours"] else [True]
        # Among the sessions with its agent the least is the one to use. The table of peers sets it.
        self._order = (1, 0)
        # Facts about a lost peer, kept here because native code forgets them once 64 others were lost.
        self._lost: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"<Peer {self._name!r} id={self._id}>"

    @property
    def id(self) -> int:
        """The session's number in this agent; never reused."""
        return self._id

    @property
    def name(self) -> str:
        """The name that the agent gave in the handshake."""
        return self._name

    @property
    def identity(self) -> str:
        """The identity in its certificate, ``"TENANT/ENGINE/AGENT"``; ``""`` where agents share a secret."""
        return self._identity

    @property
    def incarnation(self) -> bytes:
        """16 random bytes that identify the agent's process: a restarted process has others."""
        return self._incarnation

    @property
    def address(self) -> str:
        """The address that this agent dialled; ``""`` for a peer that called."""
        return self._address

    @property
    def state(self) -> PeerState:
        """Its session's state; ``LOST`` also once this agent is closed. Never raises."""
        try:
            return PeerState(self._info()["state"])
        except AgentError:
            return PeerState.LOST

    @property
    def rails(self) -> tuple[str, ...]:
        """Transports of the rails that are alive, e.g. ``("shm", "unix")``.

        Their order means nothing; `Transfer.rails` says which of them moved a transfer's bytes.
        """
        return tuple(self._info()["rails"])

    @property
    def paths(self) -> tuple[str, ...]:
        """Describes the devices of live rails that use their own, with both ends' addresses.

        Each text also says how pages come to this end. For people: ``"verbs: mlx5_0 port 1 from GID 3,
        10.0.0.1, RoCE v2, to 10.0.0.2 (mlx5_1 port 1), by READ"``, with the classes of priorities where there
        are several (``verbs.classes``). `Agent.explain` has the rest.
        """
        return tuple(self._info()["paths"])

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about transports that are not used, with the reason.

        For a lost rail they say when it is dialled again.
        """
        return tuple(self._info()["notes"])

    @property
    def error(self) -> KvxferError | None:
        """Why it was lost: a `PeerError`, or `AgentError` when this agent closed; None while it is open."""
        info = self._info()
        return loss_of(info, self._name) if info["state"] == PeerState.LOST else None

    @property
    def regions(self) -> Mapping[str, RegionDescriptor]:
        """Its regions by name, as far as this agent knows them; read-only.

        All regions that the peer registered before the session are in it. Use `region` to wait for one that
        the peer registers later.
        """
        self._completions.check()
        try:
            told = self._completions.core.peer_regions(self._id)
        except NativeError as error:
            raise translate(error, peer=self._name) from None
        regions = _Regions(self._name)
        for item in told:
            regions[item["name"]] = self._describe(item)
        self._descriptors = {descriptor.id: descriptor for descriptor in regions.values()}
        return MappingProxyType(regions)

    async def region(self, name: str, timeout_s: float | None = None) -> RegionDescriptor:
        """Returns its region `name`, waiting for it to be registered.

        Parameters
        ----------
        name
            As the peer registered it.
        timeout_s
            None takes the options' ``connect_timeout_s``.

        Raises
        ------
        TimeoutError
            The peer did not register it in time; the message names the regions that it has.
        PeerError
            The peer was lost.
        UsageError
            ``invalid-argument``: `name` is no text.
        """
        _check_region_name(name)
        timeout_s = self._connect_timeout_s if timeout_s is None else timeout_s
        # If it did not come in time, _named raises and lists the regions that exist.
        await self._completions.until(("region", self._id), lambda: self._has(name), timeout_s)
        return self._named(name, timeout_s)

    def region_blocking(self, name: str, timeout_s: float | None = None) -> RegionDescriptor:
        """Returns its region `name`, blocking until it is registered: the blocking twin of `region`."""
        _check_region_name(name)
        timeout_s = self._connect_timeout_s if timeout_s is None else timeout_s
        self._completions.block_until(lambda: self._has(name), timeout_s)
        return self._named(name, timeout_s)

    def send(self, payload: bytes) -> None:
        """Sends the peer a message, which its caller reads with ``agent.messages()``. Returns at once.

        Messages to one peer arrive in the order of sending. Their order relative to transfers and
        notifications is not defined. Messages that are under way when the session ends are lost: if you need
        an acknowledgement, have the receiver answer with a message.

        Parameters
        ----------
        payload
            At most 65,536 bytes. An empty message is allowed.

        Raises
        ------
        ExhaustedError
            Too many messages wait unread at the peer. 1 MiB may wait there, and each message counts at least
            4 KiB: 256 short messages or 16 of the longest. Nothing was sent; wait with `sendable`.
        UsageError
            ``invalid-argument``: `payload` is too long, or is not bytes.
        PeerError
            The peer is lost.

        Notes
        -----
        One call into native code.
        """
        try:
            self._completions.core.send(self._id, payload)
        except NativeError as error:
            raise self._not_sent(error) from None

    async def sendable(self, nbytes: int = MAX_MESSAGE_NBYTES, timeout_s: float | None = None) -> None:
        """Waits until there is room to `send` a message of `nbytes`.

        The peer reports room when its caller has read a quarter of the limit. Another task or thread may use
        the room first; then `send` raises again.

        Parameters
        ----------
        nbytes
            Length of the message to send.
        timeout_s
            None waits without bound.

        Raises
        ------
        TimeoutError
            There was no room in time.
        PeerError
            The peer was lost.
        """
        nbytes, key = _nbytes(nbytes), ("room", self._id)
        if not await self._completions.until(key, lambda: self._has_room(nbytes), timeout_s):
            raise self._no_room(nbytes, timeout_s)

    def sendable_blocking(self, nbytes: int = MAX_MESSAGE_NBYTES, timeout_s: float | None = None) -> None:
        """Blocks until there is room to `send` a message of `nbytes`: the twin of `sendable`."""
        nbytes = _nbytes(nbytes)
        if not self._completions.block_until(lambda: self._has_room(nbytes), timeout_s):
            raise self._no_room(nbytes, timeout_s)

    def disconnect(self) -> None:
        """Ends the session: transfers and leases with the peer end at both sides. Idempotent.

        Does nothing if the session has already ended, at either end. From then on the peer stays lost, and
        its methods raise `PeerError` (``peer-lost`` if this call ended the session).
        """
        self._completions.check()
        try:
            self._completions.core.disconnect(self._id)
        except NativeError as error:
            raise translate(error, peer=self._name) from None

    # ---- inside -----------------------------------------------------------------------------

    def _take(self) -> bool:
        """Returns whether the peer called and was not accepted yet. Only the first call gets True."""
        try:
            self._unaccepted.pop()
        except IndexError:
            return False
        return True

    def _has_room(self, nbytes: int) -> bool:
        try:
            return self._completions.core.has_room(self._id, nbytes)
        except NativeError as error:
            raise self._not_sent(error) from None

    def _not_sent(self, error: NativeError) -> KvxferError:
        """Returns the error of `send`; if the peer is lost, the reason for that."""
        self._completions.check()
        return self.error or translate(error, peer=self._name)

    def _no_room(self, nbytes: int, timeout_s: float | None) -> TimeoutError:
        return TimeoutError(
            f"{self._name} has no room for a message of {nbytes} bytes after {timeout_s} s: its "
            "program does not read messages (agent.messages())"
        )

    def _info(self) -> dict[str, Any]:
        self._completions.check()
        if self._lost is not None:
            return self._lost
        try:
            info = self._completions.core.peer(self._id)
        except NativeError as error:
            code, message = error.args
            if code != CODES["peer-lost"]:
                raise translate(error, peer=self._name) from None
            info = {"state": "lost", "rails": [], "paths": [], "notes": [], "code": code, "message": message}
        if info["state"] == "lost":
            self._lost = info
        return info

    def _describe(self, item: dict[str, Any]) -> RegionDescriptor:
        known = self._descriptors.get(item["id"])
        path, notes = str(item["path"]), tuple(item["notes"])
        if known is not None and known.path == path and known.notes == notes:
            return known
        try:
            layout = known.layout if known is not None else KVLayout.from_bytes(item["layout"])
        except UsageError as error:
            raise PeerError(
                f"region {item['name']!r} of {self._name} has a layout that cannot be read: {error.args[0]}",
                code="protocol",
                peer=self._name,
            ) from None
        return RegionDescriptor(
            agent=self._name,
            incarnation=self._incarnation,
            id=item["id"],
            name=item["name"],
            nbytes=item["nbytes"],
            num_blocks=item["num_blocks"],
            layout=layout,
            address=self._address,
            path=path,
            notes=notes,
            _peer=self,
        )

    def _has(self, name: str) -> bool:
        return self.state is PeerState.LOST or name in self.regions

    def _named(self, name: str, timeout_s: float) -> RegionDescriptor:
        if (error := self.error) is not None:
            raise error
        regions = self.regions
        if name not in regions:
            raise TimeoutError(
                f"{self._name} did not register region {name!r} within {timeout_s} s "
                f"(it has: {listed(regions, 'none')})"
            )
        return regions[name]


def session_with(peers: Sequence[Peer], agent: str) -> Peer | None:
    """Returns the session that `Agent.connect` gives for an agent, or None.

    If several agents had the name one after the other, the newest is meant. If several sessions with it are
    open, because both ends called, both ends get the same one.

    Parameters
    ----------
    peers
        `Agent.peers`.
    agent
        A name, an incarnation in hexadecimal digits, or an address that was dialled.
    """
    for newest in reversed(peers):
        if agent in (newest.name, newest.incarnation.hex(), newest.address):
            sessions = (peer for peer in peers if peer.incarnation == newest.incarnation)
            return min(sessions, key=lambda peer: peer._order)
    return None


def place_of_caller(here: AnyStr, there: AnyStr, *, is_ours: bool) -> int:
    """Returns 0 for a session that the agent with the lesser incarnation opened, 1 for another.

    If both ends call, there are two sessions, which may come up in another order at each end. Both ends use
    the one with 0.
    """
    return int(is_ours != (here < there))


def loss_of(info: dict[str, Any], name: str) -> KvxferError:
    """Returns why a session ended, in the class that docs/errors.md has for its code.

    Native code always ends a session with a `PeerError` code, or with ``closed`` when this agent closes.
    """
    return from_code(info["code"], info["message"], peer=name)


def _check_region_name(name: object) -> None:
    check_kind(name, "name", str, "a text, the name under which the peer registered the region")


def _nbytes(nbytes: object) -> int:
    return count(nbytes, "nbytes", 0, MAX_MESSAGE_NBYTES)
