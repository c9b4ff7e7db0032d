"""The pool's memory as regions of the daemon's agent: one for each layout that has slabs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container

import numpy as np
from numpy.typing import NDArray

from kvxfer.control.host_pool.page import Page
from kvxfer.control.host_pool.page_layout import page_nbytes, pool_layout
from kvxfer.control.host_pool.pool_jobs import looked_at
from kvxfer.control.own.own_agent import OwnAgent
from kvxfer.errors import KvxferError
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.log import logger
from kvxfer.region import Region


class PoolRegions:
    """Registers the pool's memory once for each layout, and deregisters layouts that have no slab left.

    Each region spans the whole pool, on the grid of its pages. So one lease and one transfer are enough for
    pages of several slabs. Regions of two layouts overlap. Only the layout of a slab uses the slab's memory;
    `PageIndex` ensures that.
    """

    def __init__(
        self,
        own: OwnAgent,
        memory: NDArray[np.uint8],
        slab_nbytes: int,
        alignment_nbytes: int,
        layout_in_files: Callable[[str], KVLayout | None],
    ) -> None:
        self._own = own
        #: The whole pool.
        self.memory = memory
        self._slab_nbytes = slab_nbytes
        self._alignment_nbytes = alignment_nbytes
        self._layout_in_files = layout_in_files
        self._made: dict[str, asyncio.Task[Region]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._num_made = 0

    def __getitem__(self, digest: str) -> Region:
        """Returns the region of a layout that has parked pages."""
        return self._made[digest].result()

    def page_nbytes(self, layout: KVLayout) -> int:
        """Returns how many bytes of the pool a page of `layout` takes."""
        return page_nbytes(layout, self._slab_nbytes, self._alignment_nbytes)

    def nbytes_in_files(self, layout: KVLayout) -> int:
        """Returns how many bytes a page takes in files: the same whatever the size of the pool is."""
        return page_nbytes(layout, 0, self._alignment_nbytes)

    def address(self, page: Page) -> int:
        """Returns where a page lies."""
        return int(self.memory.ctypes.data) + page.block * page.nbytes

    async def get(self, digest: str, layout: KVLayout) -> Region:
        """Returns the region of a layout, and registers it if needed; cancelling leaves that to others.

        A device may take long to pin a large pool, so a thread registers it.

        Raises
        ------
        KvxferError
            As for `Agent.register`; the next call tries again.
        """
        task = self._made.get(digest)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            # Two layouts of the same contents may have other orders of axes. Pages in files keep the order
            # that they were written in, so it holds for all that come after them.
            layout = self._layout_in_files(digest) or layout
            nbytes = self.page_nbytes(layout)
            lies = pool_layout(layout, len(self.memory) // nbytes, nbytes)
            self._num_made += 1
            name = self._own.region_name("pool", str(self._num_made))
            making = asyncio.to_thread(self._own.register, name, self.memory, lies)
            task = self._made[digest] = asyncio.create_task(making, name=name)
            task.add_done_callback(looked_at)  # all waiting callers may have been cancelled
        return await asyncio.shield(task)

    def keep(self, digests: Container[str]) -> None:
        """Deregisters all other layouts; none of their pages is parked, being parked or read."""
        for digest in [digest for digest in self._made if digest not in digests]:
            ending = asyncio.create_task(self._end(self._made.pop(digest)))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _end(self, task: asyncio.Task[Region]) -> None:
        await asyncio.wait([task])
        if task.cancelled() or task.exception() is not None or self._own.agent.closed:
            return
        try:
            await task.result().deregister()
        except KvxferError as error:  # the agent keeps the memory until it is closed
            logger().error("kvxfer: %s could not be deregistered: %s", task.get_name(), error)

    async def aclose(self) -> None:
        """Deregisters all regions; nothing reads any of them after that."""
        self.keep(())
        if self._ending:
            await asyncio.wait(self._ending)
        self.memory = np.empty(0, np.uint8)
