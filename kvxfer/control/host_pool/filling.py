"""Reserved places of pages, from the start of the read until they are committed or given back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from kvxfer.control.host_pool.page import Page, PageKey
from kvxfer.control.host_pool.page_index import PageIndex
from kvxfer.control.host_pool.page_news import PageNews
from kvxfer.control.host_pool.page_sources import BorrowedLease, PageSource, PageSources
from kvxfer.control.host_pool.pool_jobs import PoolJobs
from kvxfer.control.host_pool.pool_regions import PoolRegions
from kvxfer.control.host_pool.time_left import TimeLeft
from kvxfer.control.own.own_agent import OwnAgent
from kvxfer.lease_token import LeaseToken
from kvxfer.transfer import Transfer


class Filling:
    """Reads pages into their places; other callers that want the same pages wait until the read has ended."""

    def __init__(
        self,
        own: OwnAgent,
        index: PageIndex,
        regions: PoolRegions,
        sources: PageSources,
        jobs: PoolJobs,
        news: PageNews,
    ) -> None:
        self._own = own
        self._index = index
        self._regions = regions
        self._sources = sources
        self._jobs = jobs
        self._news = news
        self._ended: dict[PageKey, asyncio.Event] = {}

    def __len__(self) -> int:
        return len(self._ended)

    def of(self, keys: Iterable[PageKey]) -> list[asyncio.Event]:
        """Returns an event for each page that another call reads; it is set when that read has ended."""
        return [self._ended[key] for key in keys]

    async def fill(
        self,
        pages: list[Page],
        source: PageSource,
        blocks: Sequence[int],
        lease: LeaseToken | None,
        left: TimeLeft,
        **how: Any,
    ) -> None:
        """Reads pages in one transfer, then makes all of them visible; a failed read gives back all places.

        Call it in the same step of the event loop that reserved the places.

        Parameters
        ----------
        blocks
            Of the source's region, one block for each page.
        lease
            Permits the read; with None the source's agent is asked for a lease, if it is attached.
        left
            The time for all of it.
        how
            As `Agent.read` takes it.
        """
        keys: list[PageKey] = []
        borrowed: BorrowedLease | None = None
        transfer: Transfer | None = None
        is_announced = is_filled = False
        try:
            keys += [page.key for page in pages]
            self._ended.update((key, asyncio.Event()) for key in keys)
            registering = self._regions.get(keys[0].layout, source.region.layout)
            region = await left.wait(registering, "the pool's memory was registered for pages of this layout")
            if lease is None:
                borrowed = await self._sources.borrow(source, blocks, left.left_s)
                lease = None if borrowed is None else borrowed.token
            into = [page.block for page in pages]
            how["timeout_s"] = left.left_s
            transfer = self._own.agent.read(region, source.region, blocks, into, lease=lease, **how)
            await transfer
            is_announced = True
            await left.wait(self._news.parked(keys), "the pages' keys were stored")
            self._index.commit(pages, time.monotonic())
            is_filled = True
        finally:
            if borrowed is not None:
                self._jobs.spawn(self._sources.give_back(borrowed))
            if is_filled:
                self._wake(keys)
            else:
                if is_announced:
                    self._news.dropped(keys, "dropped")
                self._jobs.after(transfer, partial(self._abort, pages))

    def _abort(self, pages: list[Page]) -> None:
        self._index.abort(pages)
        self._wake(page.key for page in pages)

    def _wake(self, keys: Iterable[PageKey]) -> None:
        for key in keys:
            if (ended := self._ended.pop(key, None)) is not None:
                ended.set()
