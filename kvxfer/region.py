"""Registered memory that holds a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from numpy.typing import NDArray

from kvxfer._native import CODES, NativeError
from kvxfer.arguments import bound, check_kind, seconds
from kvxfer.errors import UsageError, invalid, translate
from kvxfer.lease import Lease, LeaseMode
from kvxfer.lease_token import LeaseToken
from kvxfer.memory.block_table import BlockTable, as_ids
from kvxfer.naming import check_name
from kvxfer.peer import OWN_PEER, Peer
from kvxfer.region_descriptor import RegionDescriptor
from kvxfer.session.ownership import distinguished, foreign
from kvxfer.session.requests import Grant
from kvxfer.threads import in_thread

if TYPE_CHECKING:
    from kvxfer.layout.kv_layout import KVLayout
    from kvxfer.layout.tensor import TensorView
    from kvxfer.session.completion import Completions

T = TypeVar("T")
Blocks = BlockTable | NDArray[Any] | Iterable[int]

RegionKind = Literal["pool", "foreign", "gpu"]


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
        """The name under which it was registered, and under which peers find it."""
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
        """Its sendable form. Connected peers have it already."""
        return self._descriptor

    @property
    def kind(self) -> RegionKind:
        """``"pool"`` if peers on this host map it, ``"foreign"`` for other host memory, or ``"gpu"``."""
        return self._ask(self._completions.core.region_kind)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about the agent's rails that cannot reach the region, with the reason; empty if all can.

        Transfers use the other rails: registering fails only if no rail can reach the memory.
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
        """Grants a lease on blocks of this region. Returns at once.

        The right holds at once. ``await region.grant(...)`` returns the lease when the peer knows of it as
        well (`Lease`); ``region.grant(...).wait()`` blocks until then.

        Send `Lease.token` to the reader, e.g. through a router with the request's parameters. The reader
        passes it as ``agent.read(..., lease=token)``. Then the read uses this lease, and no other lease on
        the same blocks.

        Parameters
        ----------
        holder
            Who may use it:

            - A `Peer`: only this session. The peer learns of the lease, and may leave the token out.
            - A name: any authenticated agent of that name that passes the token, connected now or later, also
              after a restart. ``"decode-0/*"`` means every agent whose name begins with ``decode-0/``, such
              as the ranks of one engine.
            - None: any authenticated peer that passes the token.

            With a shared secret, peers choose their own names: any process that knows the secret may take a
            free name. With certificates, an agent has the name in its certificate.
        blocks
            Block ids; None for the whole region.
        mode
            ``"read"`` or ``"write"``; a write lease needs a `Peer`.
        ttl_s
            How long the lease lasts without a heartbeat from the peer, on this machine's monotonic clock.
        renewable
            Whether each heartbeat of the peer restarts `ttl_s`. They do so unless this is False; then the
            lease ends after `ttl_s` in any case. A lease without a `Peer` always ends after `ttl_s`, because
            no session's heartbeats belong to its holder.
        token
            For a lease without a `Peer`: a token from `LeaseToken.draw` that was sent to the reader before
            the grant. No region of this agent may have granted it yet. None draws a new one.
        allow
            For a lease without a `Peer`: the certificate that the reader must have shown, as a pattern of
            `Peer.identity` (``"acme/decode-*/*"``). Peers that share a secret have no certificate, and match
            no pattern. ``""``: any reader.

        Raises
        ------
        UsageError
            ``out-of-range`` for ids outside the region, ``unknown-region`` after `deregister`,
            ``invalid-argument`` for a write lease or a renewable lease without a `Peer`, a peer of another
            agent, a token that was granted before, or an invalid pattern.
        PeerError
            The peer is lost.
        """
        peer = holder if isinstance(holder, Peer) else None
        _check_holder(holder, peer)
        if peer is not None and peer._completions is not self._completions:
            raise foreign(self._completions, peer, f"peer {peer.name!r}", OWN_PEER)
        check_kind(mode, "mode", str, '"read" or "write"')
        check_kind(allow, "allow", str, 'a pattern, such as "acme/decode-*/*"')
        check_kind(renewable, "renewable", bool | None, "True, False or None")
        if mode not in ("read", "write"):
            raise invalid(f'mode must be "read" or "write", not {mode!r:.200}')
        if not (ttl_s := seconds(ttl_s, "ttl_s")):
            raise invalid("ttl_s must be a positive number of seconds, not 0")
        if peer is None and renewable:
            raise invalid(
                "a lease for a name, or for any peer, has no heartbeats that renew it: leave renewable out, "
                "and choose ttl_s long enough for the last reader to finish"
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
        """Takes the region away from peers. After this returns, no byte of it is touched.

        Its transfers and leases end with ``region-gone``, and the agent releases the tensors. A second call
        does nothing. Copies that were already launched on a GPU end first; the agent serves its other peers
        meanwhile.

        For GPU memory the call waits until peers have unmapped it, which takes a round trip to each. Then the
        memory may be freed. A peer that does not answer within the options' ``silent_timeout_s`` loses its
        rail, and the log names it; that peer's process keeps the mapping until it ends.

        Parameters
        ----------
        timeout_s
            How long to wait for such copies; None waits as long as it takes.

        Raises
        ------
        TimeoutError
            A device still copies to or from the region. Peers have lost it, but the agent keeps the tensors
            until another call returns. Any other exception from this call leaves the region in the same
            state.

        Notes
        -----
        Runs in a thread, because devices may take long to unpin memory. Cancelling abandons only the waiting.
        """
        await in_thread(self.deregister_blocking, timeout_s)

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
            left = True  # another thread did it meanwhile
        if not left:
            raise TimeoutError(
                f"region {self._name!r} is closed to peers, but a device still copies to or from it after "
                f"{timeout_s} s: do not free its memory until another deregister() has returned"
            )
        self._let_go()

    def _drawn_number(self, token: LeaseToken, peer: Peer | None) -> int:
        """Returns the number of a token that is to be granted."""
        if not isinstance(token, LeaseToken) or not token._is_drawn or peer is not None:
            raise invalid(
                "token must be a result of LeaseToken.draw(), for a lease for a name or for any peer: leave "
                "it out for a Peer, and send lease.token after the grant"
            )
        own = self._descriptor.agent, self._descriptor.incarnation
        if token.incarnation not in (b"", own[1]):
            granted_by, ours = distinguished((token.agent, token.incarnation), own)
            raise invalid(
                f"the token was granted by {granted_by}, but this region belongs to {ours}: draw another"
            )
        return token._number

    def _ask(self, question: Callable[[int], T]) -> T:
        self._check()
        try:
            return question(self._id)
        except NativeError as error:
            raise translate(error) from None

    def _check(self) -> None:
        """Raises `AgentError` if the agent can no longer be used, `UsageError` if only the region cannot."""
        self._completions.check()
        if not self._views:
            raise UsageError(
                f"region {self._name!r} (id {self._id}) was deregistered: register the memory again, and "
                "use the region that register() returns",
                code="unknown-region",
            )

    def _let_go(self) -> None:
        self._views = []
        self._on_gone(self)


def _check_holder(holder: object, peer: Peer | None) -> None:
    """Raises `UsageError` unless `holder` can hold a lease; `peer` is `holder` if that is a `Peer`."""
    if holder is None or peer is not None:
        return
    what = "a Peer from connect() or accept(), an agent's name, or None for any peer with the token"
    check_kind(holder, "holder", str, what)
    check_name(holder, "holder")
