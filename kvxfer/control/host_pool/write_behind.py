"""Writes parked pages to the files, after they were acknowledged, so that they outlive the daemon."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence

from kvxfer.control.host_pool.file_tier import FileTier
from kvxfer.control.host_pool.page import Page, PageKey, PageState
from kvxfer.control.host_pool.page_index import PageIndex
from kvxfer.control.host_pool.pool_jobs import PoolJobs
from kvxfer.control.host_pool.pool_regions import PoolRegions
from kvxfer.errors import TransferError


class WriteBehind:
    """Writes pages in the order of their parking, a bounded number of bytes at a time.

    A page keeps its place in memory while it is written, and no longer. One that is evicted before its turn
    is lost, as it would be without files.

    Parameters
    ----------
    most_nbytes
        The most that may be written at a time, so that pages that may be evicted are left.
    """

    def __init__(
        self, files: FileTier, index: PageIndex, regions: PoolRegions, jobs: PoolJobs, most_nbytes: int
    ) -> None:
        self._files = files
        self._index = index
        self._regions = regions
        self._jobs = jobs
        self._most_nbytes = most_nbytes
        self._waiting: deque[Page] = deque()
        self._nbytes = 0
        self._under_way: dict[PageKey, asyncio.Task[str]] = {}
        #: Pages that were evicted before their turn, or found no room in the files.
        self.num_lost = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._under_way)

    def add(self, pages: Iterable[Page]) -> None:
        """Will write pages that were parked just now."""
        self._waiting.extend(pages)
        self._go_on()

    async def durable(self, keys: Sequence[PageKey]) -> None:
        """Returns when pages would survive a loss of power.

        Raises
        ------
        TransferError
            ``refused``: one of them is in memory alone, since the files have no room, or do not work.
        """
        ends = await asyncio.gather(*(self._durable(key) for key in keys))
        for key, how in zip(keys, ends, strict=True):
            if how != "done":
                raise TransferError(
                    f"page {key.key!r} is not durable ({how}): kvxfer pages --pool says how the files do",
                    code="refused",
                )

    async def _durable(self, key: PageKey) -> str:
        page = self._index.find(key)
        if page is not None and key not in self._under_way:
            self._begin(page)
        if (task := self._under_way.get(key)) is not None and (how := await asyncio.shield(task)) != "done":
            return how
        return await self._files.sync(key)

    async def drained(self, within_s: float) -> bool:
        """Waits until nothing is left to write; returns whether that came in time."""
        until = time.monotonic() + within_s
        while self._under_way and time.monotonic() < until:
            await asyncio.wait(self._under_way.values(), timeout=until - time.monotonic())
        return not len(self)

    def _go_on(self) -> None:
        while self._waiting and (
            not self._under_way or self._nbytes + self._waiting[0].nbytes <= self._most_nbytes
        ):
            page = self._waiting.popleft()
            if page.state is not PageState.PARKED or self._index.find(page.key) is not page:
                self.num_lost += 1
            elif page.key not in self._under_way:
                self._begin(page)

    def _begin(self, page: Page) -> asyncio.Task[str]:
        task = self._jobs.finish(self._write(page))
        self._under_way[page.key] = task
        self._nbytes += page.nbytes
        # Held here and not in the task, which begins later.
        self._index.keep([page.key])
        task.add_done_callback(lambda _: self._written(page))
        return task

    async def _write(self, page: Page) -> str:
        layout = self._regions[page.key.layout].layout
        if (number := await self._files.number(page.key, layout)) is None:
            return "no-room"
        if page.state is not PageState.PARKED:
            return "gone"  # a drop must not miss what is written from now on
        memory_nbytes = self._index.tenants_nbytes().get(page.key.tenant, 0)
        address = self._regions.address(page)
        nbytes = self._regions.nbytes_in_files(layout)
        how = await self._files.write(page.key, number, address, nbytes, memory_nbytes)
        return "done" if how == "there" else how

    def _written(self, page: Page) -> None:
        del self._under_way[page.key]
        self._nbytes -= page.nbytes
        self._index.release([page], time.monotonic())
        self._go_on()
