"""Leases: an expiring right of a holder to named blocks of a region. Ending a lease is a fence."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from kvxfer._native import CODES, NativeError
from kvxfer.arguments import bound, seconds_or_none
from kvxfer.errors import PeerError, TransferError, translate
from kvxfer.log import beside

if TYPE_CHECKING:
    from kvxfer.lease_token import LeaseToken
    from kvxfer.peer import Peer
    from kvxfer.session.completion import Completions


LeaseMode = Literal["read", "write"]


class LeaseState(StrEnum):
    """A lease's state; all but ``ACTIVE`` and ``ENDING`` are final. Each member equals its word."""

    ACTIVE = "active"
    ENDING = "ending"  # the right has ended, but a copy under it has not: the blocks are still in use
    REVOKED = "revoked"
    EXPIRED = "expired"
    PEER_LOST = "peer-lost"
    REGION_GONE = "region-gone"
    ENDED = "ended"  # in an unknown way: the state was not read before 4096 more leases of the agent ended

    @property
    def is_final(self) -> bool:
        """Whether the lease has ended, so that no byte moves under it."""
        return self not in (LeaseState.ACTIVE, LeaseState.ENDING)


class Revocation(Coroutine[Any, Any, None]):
    """What `Lease.revoke` returns: a coroutine that does not warn if it is never awaited."""

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, None]:
        yield from self._coroutine.__await__()  # the generator keeps this object alive meanwhile

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __del__(self) -> None:
        self._coroutine.close()


class Lease:
    """A right to read blocks, or one peer's right to write them, until it ends. Made by ``region.grant``.

    A lease ends by `revoke`, when its time is over (the peer's heartbeats renew it), with the peer, or with
    the region. From then on no transfer begins under it. While a device still makes a copy under it that
    cannot be stopped, the lease is ``ENDING``. When it *has ended*, no byte lands in the blocks under a write
    lease, and no read under a read lease is reported done: the blocks may be used again. As a context
    manager, ``async with`` or ``with``, a lease is revoked at the end of the block, which waits until the
    lease has ended.

    A lease holds from the call of ``grant`` on. The peer learns of it a little later; awaiting the lease
    waits for that (``lease = await region.grant(peer, ...)``). If you tell the peer about the blocks by
    another way, await the lease first, or send its `token` along.

    A lease that was granted to a name or to None permits every read that passes its `token`, also several at
    once and repeated ones. It is not renewed. The loss of a peer ends only that peer's reads. No peer is
    notified of such a lease, so awaiting it returns at once.
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
        """The token that the reader or writer passes as ``lease=``. It names only this lease."""
        return self._token

    @property
    def holder(self) -> Peer | str | None:
        """The holder that was passed to ``grant``; None for any peer that passes the token."""
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
        """The lease's state.

        Raises
        ------
        AgentError
            The agent is closed, which fenced the lease.
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
        """Waits until the peer knows of the lease (one round trip), and returns the lease.

        Cancelling abandons the waiting and leaves the lease as it is.

        Raises
        ------
        PeerError
            The peer was lost.
        TransferError
            ``lease-ended`` or ``region-gone``: the lease has ended.
        """
        return self._acknowledged().__await__()

    async def _acknowledged(self) -> Lease:
        try:
            await self._completions.until(("lease", self._id), self._is_acknowledged)
        except NativeError as error:
            raise translate(error, peer=self._holder_name) from None
        return self._checked()

    def wait(self, timeout_s: float | None = None) -> Lease:
        """Blocks until the peer knows of the lease, and returns the lease; None waits without bound.

        Raises
        ------
        TimeoutError
            The time is over, and the peer does not know of the lease yet. The lease is unchanged.
        KvxferError
            As awaiting it does.
        """
        try:
            told = self._completions.block_until(self._is_acknowledged, timeout_s)
        except NativeError as error:
            raise translate(error, peer=self._holder_name) from None
        if not told:
            raise TimeoutError(f"{self._holder_name} has not acknowledged {self!r} after {timeout_s} s")
        return self._checked()

    def revoke(self, timeout_s: float | None = None) -> Revocation:
        """Ends the right at once; awaiting the result waits until the blocks may be used again.

        Transfers under it fail at both ends with ``lease-ended``. A caller that looks at `state` later need
        not await the result. The fence waits for at most one slice of a
        copy in progress. For copies onto a GPU it waits for the launched ones, which may take long if they
        are queued behind kernels of the model. The agent serves its other peers meanwhile. If the lease has
        ended already, this does nothing; if it is ending, this waits for the end.

        Parameters
        ----------
        timeout_s
            How long to wait; None waits as long as it takes. The right ends in any case.

        Raises
        ------
        TimeoutError
            A device still copies under the lease, so its blocks must not be used yet; the lease is
            ``ENDING``. Wait on with `ended` or another call. Other exceptions of this call, and cancelling
            it, leave the lease in the same state.
        AgentError
            The agent was closed meanwhile. The blocks may be used when its ``close`` has returned.
        """
        limit_s = seconds_or_none(timeout_s, "timeout_s")
        return Revocation(self._fenced(self._revoke(0.0), limit_s))

    def revoke_blocking(self, timeout_s: float | None = None) -> None:
        """Ends the right and blocks until the blocks may be used again: the blocking twin of `revoke`."""
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
            with beside(error, f"revoking a lease of {self._holder_name or 'any peer'}"):
                await self.revoke()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._completions.lost:
            with beside(error, f"revoking a lease of {self._holder_name or 'any peer'}"):
                self.revoke_blocking()

    # ---- inside -----------------------------------------------------------------------------

    def _revoke(self, limit_s: float) -> bool:
        """Ends the right. Returns whether the fence was complete within `limit_s`."""
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
            f"the lease of {self._holder_name or 'any peer'} is revoked, but a device still copies under it "
            f"after {timeout_s} s: do not use its blocks until it has ended"
        )

    def _not_ended(self, timeout_s: float | None) -> TimeoutError:
        return TimeoutError(f"{self!r} has not ended after {timeout_s} s")

    def _is_acknowledged(self) -> bool:
        return self._completions.core.await_acknowledged(self._id)

    def _checked(self) -> Lease:
        """Returns itself while it is active; otherwise raises the error that says how it ended."""
        state = self.state
        if state is LeaseState.ACTIVE:
            return self
        peer = self._holder_name
        if state is LeaseState.PEER_LOST:
            holder = self._holder
            error = None if holder is None or isinstance(holder, str) else holder.error
            raise error or PeerError(f"{peer} was lost, and {self!r} with it", code="peer-lost", peer=peer)
        raise TransferError(
            f"{self!r} has ended, so {peer or 'a peer'} can no longer use it: grant another",
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
            state = LeaseState.ENDED  # it did exist: native code forgets leases that ended long ago
        if state.is_final:
            self._end = state
        return state
