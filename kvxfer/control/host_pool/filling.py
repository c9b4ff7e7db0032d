"""Reserved places of pages, from the start of the read until they are committed or given back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from kvxfer.control.host_pool.file_tier import FileTier
from kvxfer.control.host_pool.page import Page, PageKey
from kvxfer.control.host_pool.page_index import PageIndex
from kvxfer.control.host_pool.page_news import PageNews
from kvxfer.control.host_pool.page_sources import BorrowedLease, PageSource, PageSources
from kvxfer.control.host_pool.pool_jobs import PoolJobs
from kvxfer.control.host_pool.pool_regions import PoolRegions
from kvxfer.control.host_pool.time_left import TimeLeft
from kvxfer.control.own.own_agent import OwnAgent
from kvxfer.errors import ExhaustedError
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.lease_token import LeaseToken
from kvxfer.log import logger
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
        self._loading: set[PageKey] = set()  # from files, and not dropped meanwhile

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

    async def load(self, files: FileTier, keys: Sequence[PageKey], layout: KVLayout, left: TimeLeft) -> None:
        """Reads pages from files into places of the pool; those that come back whole are parked again.

        A page that does not is gone. When there is no room for all of them, none is read. Pages that others
        are reading are waited for.

        Parameters
        ----------
        keys
            Distinct, of one layout; of those that are parked, nothing is done.
        layout
            Of the pages.
        """
        now = time.monotonic()
        try:
            reserved = self._index.reserve(keys, self._regions.page_nbytes(layout), now)
        except ExhaustedError as error:
            logger().info("kvxfer: %d pages stay in files: %s", len(keys), error)
            return
        others = self.of(reserved.parking)
        if reserved.pages:
            self._ended.update((page.key, asyncio.Event()) for page in reserved.pages)
            self._loading.update(page.key for page in reserved.pages)
            loading = self._jobs.finish(self._load(files, reserved.pages, layout))
            self._news.dropped(reserved.evicted, "evicted")
            self._regions.keep(self._index.layouts)
            await left.wait(asyncio.shield(loading), "the pages were read from files")
        for other in others:
            await left.wait(other.wait(), "another call had read some of these pages")

    def drop_loading(self, keys: Iterable[PageKey]) -> list[asyncio.Event]:
        """Parks nothing of pages that are being read from files; the events are set when that has ended."""
        loading = [key for key in keys if key in self._loading]
        self._loading.difference_update(loading)
        return self.of(loading)

    async def _load(self, files: FileTier, pages: list[Page], layout: KVLayout) -> None:
        # Nothing cancels it: a page's place is taken until its read has ended.
        try:
            await self._regions.get(pages[0].key.layout, layout)
        except BaseException:
            self._loading.difference_update(page.key for page in pages)
            self._abort(pages)
            raise
        nbytes = self._regions.nbytes_in_files(layout)
        ends = [files.read(page.key, self._regions.address(page), nbytes) for page in pages]
        for page, end in zip(pages, ends, strict=True):
            how = await end
            if how == "done" and page.key in self._loading:
                self._index.commit([page], time.monotonic(), is_new=False)
            else:
                self._index.abort([page])
            self._loading.discard(page.key)
            self._wake([page.key])

    def _abort(self, pages: list[Page]) -> None:
        self._index.abort(pages)
        self._wake(page.key for page in pages)

    def _wake(self, keys: Iterable[PageKey]) -> None:
        for key in keys:
            if (ended := self._ended.pop(key, None)) is not None:
                ended.set()
