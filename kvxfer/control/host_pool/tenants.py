"""How much of the pool each tenant uses, and the most that it may use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvxfer.control.host_pool.page import Page
from kvxfer.errors import ExhaustedError


class Tenants:
    """Counts the bytes of tenants, and knows their quotas; None means no bound."""

    def __init__(self, quota_nbytes: int | None, quotas: Mapping[str, int | None]) -> None:
        self._quota_nbytes = quota_nbytes
        self._quotas = dict(quotas)
        self._used: dict[str, int] = {}

    @property
    def used_nbytes(self) -> Mapping[str, int]:
        """Bytes of each tenant, including pages that are being filled, or are dropped but still read."""
        return self._used

    def quota_nbytes(self, tenant: str) -> int | None:
        """Returns the most that a tenant may have, or None for no bound."""
        return self._quotas.get(tenant, self._quota_nbytes)

    def set_quota(self, tenant: str, nbytes: int | None) -> None:
        """Changes a tenant's quota from now on."""
        self._quotas[tenant] = nbytes

    def over_nbytes(self, tenant: str, nbytes: int, idle: Iterable[Page]) -> int:
        """Returns how many bytes of a tenant's `idle` pages must be evicted to make room for `nbytes` more.

        Raises
        ------
        ExhaustedError
            Evicting all of them would not be enough.
        """
        quota = self.quota_nbytes(tenant)
        if quota is None:
            return 0
        used_nbytes = self._used.get(tenant, 0)
        over_nbytes = short_nbytes = used_nbytes + nbytes - quota
        for page in idle:
            if short_nbytes <= 0:
                break
            short_nbytes -= page.nbytes
        if short_nbytes > 0:
            raise ExhaustedError(
                f"{nbytes} bytes more exceed the quota of tenant {tenant!r} ({quota} bytes, "
                f"{used_nbytes} of them used), and evicting its idle pages would not make enough room: "
                "unpin or drop some, or raise the quota",
                code="exhausted",
            )
        return over_nbytes

    def add(self, tenant: str, nbytes: int) -> None:
        """Adds a page's bytes, or subtracts them if `nbytes` is negative."""
        self._used[tenant] = self._used.get(tenant, 0) + nbytes
        if not self._used[tenant]:
            del self._used[tenant]
