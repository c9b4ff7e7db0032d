"""Leases of the daemon's own agents: each has a number, and a time that can be extended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvxfer.agent import Agent
from kvxfer.arguments import seconds
from kvxfer.errors import ExhaustedError, TransferError, invalid
from kvxfer.lease import Lease
from kvxfer.lease_token import LeaseToken
from kvxfer.log import logger

#: How many leases may be open at a time, and how long one may last.
MOST_LEASES: Final = 4096
MAX_TTL_S: Final = 24 * 3600.0


@dataclass(slots=True, eq=False)
class OwnLease:
    """A right to blocks of a region of the daemon's own agent; its time can be extended.

    Attributes
    ----------
    number
        The number that names the lease here; never reused.
    region
        The region's name.
    lease
        The granted lease. It has no time of its own: `OwnLeases` revokes it when the time is over.
    expires_at
        By the event loop's clock (CLOCK_MONOTONIC).
    end
        How it ended: ``"revoked"``, ``"expired"``, ``"peer-lost"``, ``"region-gone"``, ``"closed"``; ``""``
        while it has not ended.
    """

    number: int
    region: str
    lease: Lease
    expires_at: float
    end: str = ""
    _timer: asyncio.TimerHandle | None = None
    _watcher: asyncio.Task[None] | None = None

    @property
    def token(self) -> LeaseToken:
        """What the reader passes as ``lease=``."""
        return self.lease.token


class OwnLeases:
    """One agent's leases that have not ended, by number."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._open: dict[int, OwnLease] = {}
        self._last = 0
        #: Called when a lease has expired; the agent itself counts it as revoked. Must not block.
        self.on_expired: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._open)

    def stop_clocks(self) -> None:
        """Stops all expiries, because the agent is about to be closed, which ends all leases."""
        for lease in list(self._open.values()):
            if lease._timer is not None:
                lease._timer.cancel()

    async def ended(self) -> None:
        """Waits until all leases have ended."""
        watchers = [lease._watcher for lease in self._open.values() if lease._watcher is not None]
        if watchers:
            await asyncio.wait(watchers)

    def require_room(self, ttl_s: float) -> float:
        """Returns the checked duration of a new lease; raises like `OwnAgent.grant` if there is no room."""
        ttl_s = _ttl(ttl_s)
        if len(self._open) >= MOST_LEASES:
            raise ExhaustedError(f"{MOST_LEASES} leases are open: revoke some", code="exhausted")
        return ttl_s

    def keep(
        self, region: str, lease: Lease, ttl_s: float, on_end: Callable[[OwnLease], None] | None
    ) -> OwnLease:
        """Adds a new lease, and ends it when its time is over."""
        loop = asyncio.get_running_loop()
        self._last += 1
        own = OwnLease(self._last, region, lease, loop.time() + ttl_s)
        self._open[own.number] = own
        own._timer = loop.call_at(own.expires_at, self._expire, own)
        own._watcher = asyncio.create_task(self._watch(own, on_end), name=f"lease {own.number}")
        return own

    def extend(self, number: int, ttl_s: float) -> OwnLease:
        """Begins a lease's time anew.

        Raises
        ------
        TransferError
            ``lease-ended``: the lease has ended, or never existed.
        """
        ttl_s = _ttl(ttl_s)
        own = self._lease(number)
        assert own._timer is not None
        own._timer.cancel()
        own.expires_at = asyncio.get_running_loop().time() + ttl_s
        own._timer = asyncio.get_running_loop().call_at(own.expires_at, self._expire, own)
        return own

    async def revoke(self, number: int) -> None:
        """Ends a lease; when this returns, no byte moves under it. Does nothing if the lease has ended.

        Cancelling this call abandons only the waiting.
        """
        own = self._open.get(number)
        if own is None:
            return
        self.end(own, "revoked")
        assert own._watcher is not None
        await asyncio.wait([own._watcher])

    def _lease(self, number: int) -> OwnLease:
        own = self._open.get(number)
        if own is None or own.end:
            raise TransferError(
                f"lease {number} has ended, or never existed: grant another", code="lease-ended"
            )
        return own

    def _expire(self, own: OwnLease) -> None:
        if not own.end and self.on_expired is not None:
            self.on_expired()
        self.end(own, "expired")

    def end(self, own: OwnLease, how: str) -> None:
        """Ends the right; the lease's watcher waits for the fence."""
        if not own.end:
            own.end = how
        if own._timer is not None:
            own._timer.cancel()
        if not self.agent.closed:
            # Revokes at once. The returned coroutine would wait for the fence; it is closed, since the
            # watcher waits.
            own.lease.revoke().close()

    async def _watch(self, own: OwnLease, on_end: Callable[[OwnLease], None] | None) -> None:
        """Removes a lease from the table when it has ended, for any reason."""
        try:
            state = await own.lease.ended()
            own.end = own.end or str(state)
        except Exception as error:
            if not self.agent.closed:
                logger().error("kvxfer: lease %d: %r", own.number, error)
            own.end = own.end or "closed"
        finally:
            if own._timer is not None:
                own._timer.cancel()
            self._open.pop(own.number, None)
            if on_end is not None:
                on_end(own)


def _ttl(ttl_s: float) -> float:
    ttl_s = seconds(ttl_s, "ttl_s")
    if not 0 < ttl_s <= MAX_TTL_S:
        raise invalid(f"ttl_s is {ttl_s}, but a lease lasts at most {MAX_TTL_S:g} s")
    return ttl_s
