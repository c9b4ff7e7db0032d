"""What each tenant has in the pool, and the most that it may have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvxfer.control.host_pool.page import Page
from kvxfer.errors import ExhaustedError


@dataclass(slots=True)
class TenantUse:
    """What one tenant has in the pool.

    Attributes
    ----------
    nbytes, num_pages
        In all, pages that are being parked or are dropped and still read included.
    """

    nbytes: int = 0
    num_pages: int = 0


class Tenants:
    """Counts what tenants have, and knows their quotas; None is no bound."""

    def __init__(self, quota_nbytes: int | None, quotas: Mapping[str, int | None]) -> None:
        self._quota_nbytes = quota_nbytes
        self._quotas = dict(quotas)
        self._uses: dict[str, TenantUse] = {}

    @property
    def uses(self) -> Mapping[str, TenantUse]:
        """Of those that have something; read only."""
        return self._uses

    def set_quota(self, tenant: str, nbytes: int | None) -> None:
        """Changes the most that one may have from now on."""
        self._quotas[tenant] = nbytes

    def over_nbytes(self, tenant: str, nbytes: int, idle: Iterable[Page]) -> int:
        """Returns how many bytes of a tenant's `idle` pages have to give way for `nbytes` more.

        Raises
        ------
        ExhaustedError
            It is not enough if all of them do.
        """
        quota = self._quotas.get(tenant, self._quota_nbytes)
        if quota is None:
            return 0
        has_nbytes = self._uses[tenant].nbytes if tenant in self._uses else 0
        over_nbytes = short_nbytes = has_nbytes + nbytes - quota
        for page in idle:
            if short_nbytes <= 0:
                break
            short_nbytes -= page.nbytes
        if short_nbytes > 0:
            raise ExhaustedError(
                f"{nbytes} bytes more are over the quota of tenant {tenant!r} ({quota} bytes, of which it "
                f"has {has_nbytes}), and what it has is pinned, or being read, or not enough: unpin or drop "
                "some, or raise the quota",
                code="exhausted",
            )
        return over_nbytes

    def add(self, tenant: str, nbytes: int) -> None:
        """Counts a page."""
        use = self._uses.setdefault(tenant, TenantUse())
        use.nbytes += nbytes
        use.num_pages += 1

    def remove(self, tenant: str, nbytes: int) -> None:
        """Counts it no more."""
        use = self._uses[tenant]
        use.nbytes -= nbytes
        use.num_pages -= 1
        if not use.num_pages:
            del self._uses[tenant]
