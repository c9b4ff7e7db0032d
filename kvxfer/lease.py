"""An expiring right to named blocks of a region, of whom it was granted to; ending it is a fence."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from kvxfer._native import CODES, NativeError
from kvxfer.arguments import bound, seconds_or_none
from kvxfer.errors import PeerError, TransferError, translate

if TYPE_CHECKING:
    from kvxfer.lease_token import LeaseToken
    from kvxfer.peer import Peer
    from kvxfer.session.completion import Completions


LeaseMode = Literal["read", "write"]


class LeaseState(StrEnum):
    """Where a lease stands; all but ``ACTIVE`` and ``ENDING`` are final. Members equal their words."""

    ACTIVE = "active"
    ENDING = "ending"  # the right has ended, and a copy under it has not: the blocks are still in use
    REVOKED = "revoked"
    EXPIRED = "expired"
    PEER_LOST = "peer-lost"
    REGION_GONE = "region-gone"
    ENDED = "ended"  # how was never asked, and 4096 other leases of the agent have ended since

    @property
    def is_final(self) -> bool:
        """Whether no byte under the lease moves any more."""
        return self not in (LeaseState.ACTIVE, LeaseState.ENDING)


class Lease:
    """Blocks that others may read, or one peer write, until the lease ends. Made by ``region.grant``.

    It ends by `revoke`, by its time (renewed by the peer's heartbeats), with the peer, or with the
    region. Nothing begins under it from then on, and when it *has ended* no byte lands in the blocks
    under it (a write lease), and no read under it is reported done (a read lease): they may be used
    again. In between, while a device copies that cannot be stopped, it is ``ENDING``. As a context
    manager, ``async with`` or ``with``, it is revoked at the end of the block, which waits for that.

    It holds from the call of ``grant`` on. A peer hears of it a little later: awaiting the lease waits
    until it has (``lease = await region.grant(peer, ...)``). Whoever tells the peer by another way that
    blocks are there waits for it first, or hands on its `token`.

    A lease that was granted to a name, or to anybody, lets in reads that name its `token`, several at
    once and again. It is not renewed, and a peer that is lost ends its own reads alone. Nobody is told of
    it, so awaiting it waits for nothing.
    """

    __slots__ = ("_completions", "_end", "_holder", "_id", "_mode", "_num_blocks", "_token")

    def __init__(
        self,
        completions: Completions,
        token: LeaseToken,
        holder: Peer | str | None,
        mode: LeaseMode,
        num_blocks: int | None,
    ) -> None:
        self._completions = completions
        self._token = token
        self._id = token._number
        self._holder = holder
        self._mode = mode
        self._num_blocks = num_blocks
        self._end: LeaseState | None = None  # the final state, once it was seen

    def __repr__(self) -> str:
        blocks = "all" if self._num_blocks is None else self._num_blocks
        state = "of a closed agent" if self._completions.lost else self.state
        return f"<Lease {self._mode} holder={self._holder_name or 'any'} blocks={blocks} {state}>"

    @property
    def token(self) -> LeaseToken:
        """What to hand to the reader or writer, for its ``lease=``: it names this lease, and no other."""
        return self._token

    @property
    def holder(self) -> Peer | str | None:
        """Who may use it, as it was granted; None for any peer that passes the token."""
        return self._holder

    @property
    def _holder_name(self) -> str:
        if self._holder is None or isinstance(self._holder, str):
            return self._holder or ""
        return self._holder.name

    @property
    def mode(self) -> LeaseMode:
        """What the peer may do with the blocks."""
        return self._mode

    @property
    def state(self) -> LeaseState:
        """Where it stands.

        Raises
        ------
        AgentError
            The agent is closed, and the lease fenced with it.
        """
        self._completions.check()
        try:
            return self._state()
        except NativeError as error:
            raise translate(error, peer=self._holder_name) from None

    @property
    def active(self) -> bool:
        """Whether the peer still has the right."""
        return self.state is LeaseState.ACTIVE

    def __await__(self) -> Generator[Any, None, Lease]:
        """Waits until the peer has heard of it, one round trip, and returns the lease.

        Cancelling abandons the waiting and leaves the lease as it is.

        Raises
        ------
        PeerError
            The peer was lost.
        TransferError
            ``lease-ended`` or ``region-gone``: it has ended.
        """
        return self._told().__await__()

    async def _told(self) -> Lease:
        try:
            await self._completions.until(("lease", self._id), self._is_told)
        except NativeError as error:
            raise translate(error, peer=self._holder_name) from None
        return self._checked()

    def wait(self, timeout_s: float | None = None) -> Lease:
        """Blocks until the peer has heard of it, and returns the lease; None waits without bound.

        Raises
        ------
        TimeoutError
            The peer has not heard of it when the time is over. The lease is as it was.
        KvxferError
            As awaiting it does.
        """
        try:
            told = self._completions.block_until(self._is_told, timeout_s)
        except NativeError as error:
            raise translate(error, peer=self._holder_name) from None
        if not told:
            raise TimeoutError(f"{self._holder_name} has not heard of {self!r} after {timeout_s} s")
        return self._checked()

    def revoke(self, timeout_s: float | None = None) -> Coroutine[Any, Any, None]:
        """Ends the right at once; awaiting the result waits until the blocks may be used again.

        Transfers under it fail at both ends with ``lease-ended``. The fence waits for at most one slice
        of a copy in progress; where it lands on a GPU, for what is launched, which may be long where it
        stands behind kernels of the model. The agent serves everybody else meanwhile. Does nothing when
        it has ended, and waits on when it is ending.

        Parameters
        ----------
        timeout_s
            How long the caller would wait; None as long as it takes. The right ends in any case.

        Raises
        ------
        TimeoutError
            A device still copies under it, so its blocks are not to be used yet; it is ``ENDING``.
            `ended` waits on, as does another call. Other exceptions that come from here, and
            cancelling the waiting, leave it as this one does.
        AgentError
            The agent was closed meanwhile: the blocks may be used when its ``close`` has returned.
        """
        limit_s = seconds_or_none(timeout_s, "timeout_s")
        return self._fenced(self._revoke(0.0), limit_s)

    def revoke_blocking(self, timeout_s: float | None = None) -> None:
        """Ends it. When this returns the blocks may be used again: the blocking twin of `revoke`."""
        if not self._revoke(bound(timeout_s)):
            raise self._still_copied(timeout_s)

    async def ended(self, timeout_s: float | None = None) -> LeaseState:
        """Waits until it has ended and returns `state`.

        Raises
        ------
        TimeoutError
            It is still active, or ending, when the time is over.
        AgentError
            The agent was closed meanwhile.
        """
        try:
            over = await self._completions.until(("lease", self._id), self._is_over, timeout_s)
        except NativeError as error:
            raise translate(error, peer=self._holder_name) from None
        if not over:
            raise self._not_ended(timeout_s)
        return self.state

    def ended_blocking(self, timeout_s: float | None = None) -> LeaseState:
        """Blocks until it has ended and returns `state`: the blocking twin of `ended`."""
        try:
            over = self._completions.block_until(self._is_over, timeout_s)
        except NativeError as error:
            raise translate(error, peer=self._holder_name) from None
        if not over:
            raise self._not_ended(timeout_s)
        return self.state

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._completions.lost:
            await self.revoke()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._completions.lost:
            self.revoke_blocking()

    # ---- inside -----------------------------------------------------------------------------

    def _revoke(self, limit_s: float) -> bool:
        """Ends the right, and returns whether the fence is complete within `limit_s`."""
        self._completions.check()
        try:
            return self._completions.core.revoke(self._id, limit_s)
        except NativeError as error:
            raise translate(error, peer=self._holder_name) from None

    async def _fenced(self, over: bool, limit_s: float | None) -> None:
        if not over:
            try:
                await self.ended(limit_s)
            except TimeoutError:
                raise self._still_copied(limit_s) from None

    def _still_copied(self, timeout_s: float | None) -> TimeoutError:
        return TimeoutError(
            f"the lease of {self._holder_name or 'any peer'} is revoked, but a device still copies "
            f"under it after {timeout_s} s: do not use its blocks before it has ended"
        )

    def _not_ended(self, timeout_s: float | None) -> TimeoutError:
        return TimeoutError(f"{self!r} has not ended after {timeout_s} s")

    def _is_told(self) -> bool:
        return self._completions.core.await_told(self._id)

    def _checked(self) -> Lease:
        """Returns itself while it is active, and raises how it ended otherwise."""
        state = self.state
        if state is LeaseState.ACTIVE:
            return self
        peer = self._holder_name
        if state is LeaseState.PEER_LOST:
            holder = self._holder
            error = None if holder is None or isinstance(holder, str) else holder.error
            raise error or PeerError(f"{peer} was lost, and {self!r} with it", code="peer-lost", peer=peer)
        raise TransferError(
            f"{self!r} has ended, so {peer or 'a peer'} can use it no more: grant another",
            code="region-gone" if state is LeaseState.REGION_GONE else "lease-ended",
            peer=peer,
        )

    def _is_over(self) -> bool:
        return self._state().is_final

    def _state(self) -> LeaseState:
        if self._end is not None:
            return self._end
        try:
            state = LeaseState(self._completions.core.lease_state(self._id))
        except NativeError as error:
            if error.args[0] != CODES["invalid-argument"]:
                raise
            state = LeaseState.ENDED  # it was there: native code forgets leases that have ended long ago
        if state.is_final:
            self._end = state
        return state
