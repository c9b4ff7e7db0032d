"""Registered memory that holds a cache, and its sendable form."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from numpy.typing import NDArray

from kvxfer._native import CODES, NativeError
from kvxfer.arguments import bound, check_kind, seconds
from kvxfer.directory.entry import Entry
from kvxfer.errors import UsageError, invalid, translate
from kvxfer.layout.kv_layout import MAX_ENCODED_NBYTES, KVLayout
from kvxfer.layout.schema import Field, Schema, hexadecimal, integer, text
from kvxfer.lease import Lease, LeaseMode
from kvxfer.lease_token import LeaseToken
from kvxfer.memory.block_table import BlockTable, as_ids
from kvxfer.session.ownership import foreign, told_apart
from kvxfer.session.requests import Grant

if TYPE_CHECKING:
    from kvxfer.layout.tensor import TensorView
    from kvxfer.peer import Peer
    from kvxfer.session.completion import Completions

DESCRIPTOR_VERSION: Final = 3
# native/core/control/wire.h: kMaxName.
_MAX_NAME_NBYTES: Final = 128

T = TypeVar("T")
Blocks = BlockTable | NDArray[Any] | Iterable[int]

RegionKind = Literal["pool", "foreign", "gpu"]


@dataclass(frozen=True, slots=True)
class RegionDescriptor:
    """What one agent needs to know of another's region. Grants no right to it: a lease does.

    Attributes
    ----------
    agent, incarnation
        Whose it is; a restarted agent has another incarnation.
    id
        Its epoch: a region that is registered again under the same name has another.
    name
        As it was registered.
    nbytes
        From its first byte to the end of its last.
    num_blocks
        Ids are 0 to ``num_blocks - 1``.
    layout
        Where its elements lie.
    address
        Where that agent is reached, for `Agent.connect`; ``""`` where it accepts nobody, or is a peer that
        called and did not say.
    path
        The transport that will carry transfers with it, e.g. ``"shm"``; ``""`` when none can.
    notes
        Sentences on what was tried and is not used, and why.
    """

    agent: str
    incarnation: bytes
    id: int
    name: str
    nbytes: int
    num_blocks: int
    layout: KVLayout
    address: str = field(default="", compare=False)
    path: str = field(default="", compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    # The session that told it, of the agent that may use it; None for one that came by another way.
    _peer: Peer | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return (
            f"<RegionDescriptor {self.name!r} of {self.agent!r} id={self.id} num_blocks={self.num_blocks} "
            f"nbytes={self.nbytes} path={self.path!r}>"
        )

    def __reduce__(self) -> tuple[object, ...]:
        # A copy may be in another process: as with to_bytes(), whoever uses it finds its own session.
        values = self.agent, self.incarnation, self.id, self.name, self.nbytes, self.num_blocks, self.layout
        return RegionDescriptor, (*values, self.address, self.path, self.notes)

    @property
    def owner(self) -> Entry:
        """Whose it is, and where, as directories have it."""
        return Entry(self.agent, self.address, self.incarnation)

    def to_bytes(self) -> bytes:
        """Returns it as JSON with a version, for a router or scheduler to carry."""
        return _SCHEMA.encode(self)

    @classmethod
    def from_bytes(cls, encoded: bytes) -> RegionDescriptor:
        """Reads what `to_bytes` of this version or another wrote; a stranger's bytes are safe to pass.

        Fields of a newer version are passed over, unless the writer says that they are needed. The
        agent finds the peer by the incarnation when the descriptor is used.

        Raises
        ------
        UsageError
            ``invalid-argument``, naming the field.
        """
        values = _SCHEMA.decode(encoded, 2 * MAX_ENCODED_NBYTES)
        values["layout"] = KVLayout.from_bytes(values["layout"])
        if values["num_blocks"] != values["layout"].num_blocks or values["nbytes"] < values["layout"].nbytes:
            raise invalid("region descriptor contradicts its layout")
        if not 0 <= values["id"] < 1 << 64:
            raise invalid("region descriptor field id is not in 64 bits")
        found = cls(**values)
        found.owner  # noqa: B018  # which checks what it is made of
        return found


def _read_layout(value: Any) -> bytes:
    try:
        return text(value).encode()
    except UnicodeEncodeError:
        raise ValueError("is no text") from None


_SCHEMA: Final = Schema(
    what="region descriptor",
    key="kvxfer_region",
    version=DESCRIPTOR_VERSION,
    fields=(
        Field("agent", text),
        Field("incarnation", hexadecimal, write=bytes.hex),
        Field("id", integer),
        Field("name", text),
        Field("nbytes", integer),
        Field("num_blocks", integer),
        # Since version 3. Who does not know it connects by other means.
        Field("address", text, default=""),
        # A document of its own, with its own version and needs.
        Field("layout", _read_layout, write=lambda layout: layout.to_bytes().decode()),
    ),
)


class Region:
    """Memory of this process that holds a cache. Made by ``agent.register``.

    Nothing was copied; the tensors are kept alive until `deregister`.
    """

    __slots__ = ("__weakref__", "_completions", "_descriptor", "_id", "_name", "_on_gone", "_views")

    def __init__(
        self,
        completions: Completions,
        region_id: int,
        descriptor: RegionDescriptor,
        views: list[TensorView],
        on_gone: Callable[[Region], None],
    ) -> None:
        self._completions = completions
        self._id = region_id
        self._name = descriptor.name
        self._descriptor = descriptor
        self._views = views
        self._on_gone = on_gone

    def __repr__(self) -> str:
        return f"<Region {self._name!r} id={self._id} num_blocks={self.num_blocks} nbytes={self.nbytes}>"

    @property
    def id(self) -> int:
        """Its number in this agent; never reused."""
        return self._id

    @property
    def name(self) -> str:
        """As it was registered; peers find it under it."""
        return self._name

    @property
    def layout(self) -> KVLayout:
        """Where its elements lie."""
        return self._descriptor.layout

    @property
    def num_blocks(self) -> int:
        """Ids are 0 to ``num_blocks - 1``."""
        return self._descriptor.num_blocks

    @property
    def nbytes(self) -> int:
        """Bytes from its first to the end of its last, gaps between tensors included."""
        return self._descriptor.nbytes

    @property
    def descriptor(self) -> RegionDescriptor:
        """Its sendable form. Peers that are connected have it already."""
        return self._descriptor

    @property
    def kind(self) -> RegionKind:
        """Whether peers on this host map it (``"pool"``), or it is an engine's own memory or a GPU's."""
        return self._ask(self._completions.core.region_kind)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on the agent's rails that cannot reach it, and why; empty where all do.

        It is reached over the others: registering it fails only where none could.
        """
        return tuple(self._ask(self._completions.core.region_notes))

    def grant(
        self,
        holder: Peer | str | None,
        blocks: Blocks | None = None,
        mode: LeaseMode = "read",
        ttl_s: float = 30.0,
        *,
        renewable: bool | None = None,
        token: LeaseToken | None = None,
        allow: str = "",
    ) -> Lease:
        """Gives a right to blocks of this region, until it ends. Returns at once.

        The right holds at once. ``await region.grant(...)`` returns the lease when the peer has heard of it
        as well (`Lease`), which ``region.grant(...).wait()`` blocks for.

        Hand `Lease.token` to the reader, e.g. by a router with the request's parameters, for its
        ``agent.read(..., lease=token)``. Then the read finds this lease, and no other on the same blocks.

        Parameters
        ----------
        holder
            Who may use it:

            - A `Peer`: this session alone. It is told of the lease, and may leave the token out.
            - A name: any authenticated agent of that name that passes the token, connected now or later,
              also after a restart. ``"decode-0/*"`` is every agent whose name begins with ``decode-0/``,
              as those of one engine's ranks do.
            - None: any authenticated peer that passes the token.

            Names are as peers told them: whoever knows the agents' secret may take any that is free. Where
            agents have certificates, an agent has the name that its certificate is for.
        blocks
            Block ids; None for the whole region.
        mode
            ``"read"`` or ``"write"``; to write it takes a `Peer`.
        ttl_s
            How long it lasts without a sign of life of the peer, on this machine's monotonic clock.
        renewable
            Whether the peer's heartbeats start `ttl_s` anew, as they do unless this is False. If not,
            it ends after `ttl_s` in any case, as do leases of a name or of anybody: nobody's heartbeats
            are their holder's.
        token
            Of a name's or anybody's lease: what was handed on before the grant, from `LeaseToken.draw`,
            and was granted by no region of this agent yet. None draws one.
        allow
            Of a name's or anybody's lease: also which certificate its reader must have shown, as a pattern of
            `Peer.identity` (``"acme/decode-*/*"``). Peers that share a secret have none, and match nothing.
            ``""``: any.

        Raises
        ------
        UsageError
            ``out-of-range`` for ids outside the region, ``unknown-region`` after `deregister`,
            ``invalid-argument`` for a lease without a `Peer` that is to write or to be renewed, a peer of
            another agent, a token that was granted before, or what is no pattern.
        PeerError
            The peer is lost.
        """
        from kvxfer.peer import OWN_PEER, Peer  # which knows of regions

        peer = holder if isinstance(holder, Peer) else None
        _check_holder(holder, peer)
        if peer is not None and peer._completions is not self._completions:
            raise foreign(self._completions, peer, f"peer {peer.name!r}", OWN_PEER)
        check_kind(mode, "mode", str, '"read" or "write"')
        check_kind(allow, "allow", str, 'a pattern, such as "acme/decode-*/*"')
        check_kind(renewable, "renewable", bool | None, "True, False or None")
        if mode not in ("read", "write"):
            raise invalid(f'mode is "read" or "write", not {mode!r}')
        if not (ttl_s := seconds(ttl_s, "ttl_s")):
            raise invalid("ttl_s is a positive number of seconds, not 0")
        if peer is None and renewable:
            raise invalid(
                "a lease of a name, or of anybody, is renewed by nobody's heartbeats: leave renewable out, "
                "and choose ttl_s long enough for the last reader to end"
            )
        self._check()
        number = None if token is None else self._drawn_number(token, peer)
        ids = None if blocks is None else as_ids(blocks)
        if ids is not None and not len(ids):
            raise invalid("a lease on no blocks was asked for: leave blocks out for the whole region")
        grant = Grant(
            peer=None if peer is None else peer.id,
            holder=holder if isinstance(holder, str) else "",
            number=number,
            region=self._id,
            write=mode == "write",
            blocks=ids,
            ttl_s=ttl_s,
            renewable=peer is not None and renewable is not False,
            allow=allow,
        )
        try:
            number = self._completions.core.grant(grant)
        except NativeError as error:
            raise translate(error, peer="" if peer is None else peer.name) from None
        granted = LeaseToken(number, self._descriptor.agent, self._descriptor.incarnation)
        return Lease(self._completions, granted, holder, mode, None if ids is None else len(ids))

    async def deregister(self, timeout_s: float | None = None) -> None:
        """Takes the region away from peers. When this returns no byte of it is touched any more.

        Its transfers and leases end with ``region-gone``, and the tensors are let go. Does nothing
        when that was done before. Copies on a GPU that are launched end first, while the agent serves
        everybody else.

        Of GPU memory it waits until peers have unmapped it, a round trip to each: then it may be freed. A
        peer that does not answer for the options' ``silent_timeout_s`` loses its rail and is named in the
        log; its process keeps the mapping until it ends.

        Parameters
        ----------
        timeout_s
            How long the caller would wait for such copies; None as long as it takes.

        Raises
        ------
        TimeoutError
            A device still copies to or from it: peers have lost it, and the tensors are kept until
            another call returns. Other exceptions that come from here leave it so, too.

        Notes
        -----
        A thread does it, since devices may take long to unpin memory. Cancelling abandons the waiting alone.
        """
        import asyncio

        await asyncio.to_thread(self.deregister_blocking, timeout_s)

    def deregister_blocking(self, timeout_s: float | None = None) -> None:
        """Takes the region away from peers: the blocking twin of `deregister`."""
        limit_s = bound(timeout_s)
        if not self._views:
            return
        self._completions.check()
        try:
            left = self._completions.core.deregister(self._id, limit_s)
        except NativeError as error:
            if error.args[0] != CODES["unknown-region"]:
                raise translate(error) from None
            left = True  # by another thread, meanwhile
        if not left:
            raise TimeoutError(
                f"region {self._name!r} is taken from peers, but a device still copies to or from it after "
                f"{timeout_s} s: do not free its memory before another deregister() has returned"
            )
        self._let_go()

    def _drawn_number(self, token: LeaseToken, peer: Peer | None) -> int:
        """Returns the number of a token that is to be granted."""
        if not isinstance(token, LeaseToken) or not token._is_drawn or peer is not None:
            raise invalid(
                "token is what LeaseToken.draw() returned, for a lease of a name or of anybody: leave it out "
                "for a Peer's, whose lease.token is known when it is granted"
            )
        own = self._descriptor.agent, self._descriptor.incarnation
        if token.incarnation not in (b"", own[1]):
            granted_by, ours = told_apart((token.agent, token.incarnation), own)
            raise invalid(
                f"the token was granted by {granted_by}, and this is a call of {ours}: draw another"
            )
        return token._number

    def _ask(self, question: Callable[[int], T]) -> T:
        self._check()
        try:
            return question(self._id)
        except NativeError as error:
            raise translate(error) from None

    def _check(self) -> None:
        """Raises where it cannot be used any more: `AgentError` with its agent, `UsageError` without it."""
        self._completions.check()
        if not self._views:
            raise UsageError(
                f"region {self._name!r} (id {self._id}) was deregistered: register the memory again, and use "
                "what that returns",
                code="unknown-region",
            )

    def _let_go(self) -> None:
        self._views = []
        self._on_gone(self)


def _check_holder(holder: object, peer: Peer | None) -> None:
    """Raises `UsageError` for what cannot hold a lease; `peer` is `holder` where that is one."""
    if holder is None or peer is not None:
        return
    what = "a Peer, as connect() and accept() return, an agent's name, or None for any peer with the token"
    check_kind(holder, "holder", str, what)
    assert isinstance(holder, str)
    try:
        nbytes = len(holder.encode())
    except UnicodeEncodeError:
        nbytes = 0
    if not 0 < nbytes <= _MAX_NAME_NBYTES:
        raise invalid(f"holder is an agent's name, of 1 to {_MAX_NAME_NBYTES} bytes, not {holder!r}")
