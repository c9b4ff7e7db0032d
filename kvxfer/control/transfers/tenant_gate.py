"""The gate before pages and transfers: requests of a tenant with a rate wait here for their turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from kvxfer.control.schema.problems import Refusal
from kvxfer.control.state.byte_rates import ByteRates


class TenantGate:
    """Delays requests before they are posted. Requests of one tenant pass in the order of their arrival.

    A tenant without a rate passes at once, and is not delayed by others that wait.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rates = ByteRates()
        self._turns: dict[str, asyncio.Lock] = {}
        self._changed = asyncio.Event()

    def set_rates(self, rates: Mapping[str, int]) -> None:
        """Sets how many bytes a second each named tenant may request, also for requests that wait."""
        self._rates.set(rates)
        self._turns = {tenant: turn for tenant, turn in self._turns.items() if turn.locked()}
        self._changed.set()
        self._changed = asyncio.Event()

    async def enter(self, tenant: str, nbytes: int, timeout_s: float) -> float:
        """Waits for the turn of a request for `nbytes`, and returns the rest of its time.

        Raises
        ------
        Refusal
            ``rate-limited``: its turn cannot come in time; it says when it would come. ``deadline``: its time
            is over.
        """
        if self._rates.rate_of(tenant) is None:
            return timeout_s
        until_s = self._clock() + timeout_s
        try:
            async with asyncio.timeout(timeout_s), self._turns.setdefault(tenant, asyncio.Lock()):
                while (wait_s := self._rates.wait_s(tenant, self._clock())) > 0:
                    if self._clock() + wait_s > until_s:
                        raise Refusal("rate-limited", self._words(tenant, timeout_s), retry_after_s=wait_s)
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), wait_s)
        except TimeoutError:
            raise Refusal("deadline", self._words(tenant, timeout_s)) from None
        self._rates.spend(tenant, nbytes, self._clock())
        return max(until_s - self._clock(), 0.001)

    def spend(self, tenant: str, nbytes: int) -> None:
        """Charges bytes that were not known yet when the request entered."""
        self._rates.spend(tenant, nbytes, self._clock())

    def _words(self, tenant: str, timeout_s: float) -> str:
        rate = self._rates.rate_of(tenant)
        return (
            f"tenant {tenant!r} is limited to {rate} bytes a second (tenant_bytes_per_s of "
            f"/v1/settings): within {timeout_s:g} s it is not this request's turn, because the "
            "tenant's earlier requests go first"
        )
