"""How many bytes a second each tenant may request: a token bucket for each tenant with a limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: Size of a full bucket, in seconds at the rate.
BURST_S: Final = 1.0


class ByteRates:
    """Rates by tenant. A request may have any size: it may overdraw the bucket, and the next one waits."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}
        self._free_at_s: dict[str, float] = {}

    def set(self, rates: Mapping[str, float]) -> None:
        """Replaces all rates. A tenant whose rate is unchanged keeps the debt of its bucket."""
        self._free_at_s = {
            tenant: at_s
            for tenant, at_s in self._free_at_s.items()
            if rates.get(tenant) == self._rates[tenant]
        }
        self._rates = dict(rates)

    def rate_of(self, tenant: str) -> float | None:
        """Returns a tenant's bytes a second; None where it has no limit."""
        return self._rates.get(tenant)

    def wait_s(self, tenant: str, now_s: float) -> float:
        """Returns after how many seconds a tenant's next request may pass; 0 for now."""
        return max(0.0, self._free_at_s.get(tenant, now_s) - now_s)

    def spend(self, tenant: str, nbytes: int, now_s: float) -> None:
        """Takes bytes out of a tenant's bucket, if it has one."""
        if (rate := self._rates.get(tenant)) is not None:
            full_at_s = now_s - BURST_S
            free_at_s = max(self._free_at_s.get(tenant, full_at_s), full_at_s)
            self._free_at_s[tenant] = free_at_s + nbytes / rate
