"""What the pool has under way: work that ends with it, and transfers whose last byte has to be waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvxfer.errors import KvxferError, UsageError
from kvxfer.transfer import Transfer

T = TypeVar("T")


class PoolJobs:
    """Tasks of one pool; all of one event loop."""

    def __init__(self) -> None:
        self._works: set[asyncio.Task[Any]] = set()
        self._reaping: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def check_open(self) -> None:
        """Raises ``refused`` once `aclose` was called."""
        if self._is_closed:
            raise UsageError("the page pool is closed: the daemon ends", code="refused")

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs work that `aclose` ends; cancelling the caller cancels it, which gives back all by itself."""
        task = self.spawn(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                self.check_open()
            task.cancel()
            raise

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs work that ends in time, or when the pool is closed."""
        task = asyncio.create_task(work)
        self._works.add(task)
        task.add_done_callback(self._works.discard)
        task.add_done_callback(looked_at)
        return task

    def after(self, transfer: Transfer | None, then: Callable[[], None]) -> None:
        """Calls `then` when nothing of a transfer moves any more: at once where none was posted."""
        if transfer is None or transfer.state != "pending":
            then()
            return
        transfer.cancel()
        # Its own task: the pool's closing waits for it, and does not cancel it.
        reaping = asyncio.create_task(_reaped(transfer, then))
        self._reaping.add(reaping)
        reaping.add_done_callback(self._reaping.discard)

    async def one_ended(self) -> bool:
        """Waits until one of them has ended; False where there is none."""
        if not (tasks := self._works | self._reaping):
            return False
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return True

    async def aclose(self) -> None:
        """Refuses new work, cancels the rest, and waits until it has given back what it had."""
        self._is_closed = True
        while self._works:
            for work in self._works:
                work.cancel()
            await asyncio.wait(self._works)
        if self._reaping:
            await asyncio.wait(self._reaping)


async def _reaped(transfer: Transfer, then: Callable[[], None]) -> None:
    try:
        await transfer
    except KvxferError:
        pass  # who posted it has its error
    finally:
        then()


def looked_at(task: asyncio.Task[Any]) -> None:
    """Whoever waits for a task has its exception, and nobody need wait."""
    if not task.cancelled():
        task.exception()
