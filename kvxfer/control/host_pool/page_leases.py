"""Rights of readers to pages; the pages stay in their places until these rights end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvxfer.control.host_pool.page import Page, PageKey
from kvxfer.control.host_pool.page_index import PageIndex
from kvxfer.control.host_pool.pool_regions import PoolRegions
from kvxfer.control.own.own_agent import OwnAgent
from kvxfer.control.own.own_leases import OwnLease
from kvxfer.errors import TransferError
from kvxfer.lease_token import LeaseToken
from kvxfer.region_descriptor import RegionDescriptor


class LeasedPages(NamedTuple):
    """Pages of one region that a reader may read.

    Attributes
    ----------
    region
        The pages' region: the reader's agent connects to it, and reads from it.
    keys, blocks
        The key of each page, and its block in the region.
    token
        What the reader passes as ``lease=``.
    """

    region: RegionDescriptor
    keys: list[PageKey]
    blocks: list[int]
    token: LeaseToken


@dataclass(slots=True, eq=False)
class PageLease:
    """Pages that stay in their places for a reader until the lease ends.

    Attributes
    ----------
    number
        The number that names the lease here; never reused.
    holder
        The name of the agent that may read, or None for any agent that has the tokens.
    parts
        What to read: one part, because pages of one layout lie in one region; no part if all are missing.
    missing
        Requested keys that are not parked.
    expires_at
        By the event loop's clock (CLOCK_MONOTONIC).
    ended
        Set when nothing reads under it any more.
    """

    number: int
    holder: str | None
    parts: list[LeasedPages]
    missing: list[PageKey]
    expires_at: float
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _own: OwnLease | None = None
    _pages: list[Page] = field(default_factory=list)


class PageLeases:
    """Grants leases, and holds their pages until the last byte under each has moved."""

    def __init__(self, own: OwnAgent, index: PageIndex, regions: PoolRegions) -> None:
        self._own = own
        self._index = index
        self._regions = regions
        #: Leases that have not ended, by number. Read only.
        self.open: dict[int, PageLease] = {}
        self._last = 0

    def grant(self, keys: Sequence[PageKey], holder: str | None, ttl_s: float) -> PageLease:
        """Lets a reader read pages of one layout: see `PagePool.lease`."""
        held, missing = self._index.hold(keys, time.monotonic())
        self._last += 1
        leased = PageLease(
            self._last, holder, [], missing, asyncio.get_running_loop().time() + ttl_s, _pages=held
        )
        if not held:
            leased.ended.set()
            return leased
        blocks = [page.block for page in held]
        region = self._regions[held[0].key.layout]
        try:
            leased._own = own = self._own.grant(
                region.name, holder, blocks, "read", ttl_s, on_end=lambda _: self._has_ended(leased)
            )
        except BaseException:
            self._index.release(held, time.monotonic())
            raise
        leased.expires_at = own.expires_at
        leased.parts.append(LeasedPages(region.descriptor, [page.key for page in held], blocks, own.token))
        self.open[leased.number] = leased
        return leased

    def extend(self, number: int, ttl_s: float) -> PageLease:
        """Begins a lease's time anew: see `PagePool.extend`."""
        leased = self.open.get(number)
        if leased is None or leased._own is None:
            raise TransferError(
                f"lease {number} has ended, or never existed: take another", code="lease-ended"
            )
        leased.expires_at = self._own.extend(leased._own.number, ttl_s).expires_at
        return leased

    async def revoke(self, *numbers: int) -> None:
        """Ends those leases that have not ended yet; when this returns, nothing reads under them."""
        ending = [leased for number in numbers if (leased := self.open.get(number)) is not None]
        await asyncio.gather(
            *(self._own.revoke(leased._own.number) for leased in ending if leased._own is not None)
        )

    def of(self, pages: Collection[Page]) -> list[PageLease]:
        """Returns the leases that hold any of some pages."""
        wanted = set(pages)
        return [leased for leased in self.open.values() if not wanted.isdisjoint(leased._pages)]

    def _has_ended(self, leased: PageLease) -> None:
        self._index.release(leased._pages, time.monotonic())
        del self.open[leased.number]
        leased.ended.set()
