"""The pool's unfinished work: tasks that end with the pool, and transfers whose last byte it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from kvxfer.errors import KvxferError, TransferError
from kvxfer.transfer import Transfer

T = TypeVar("T")


class PoolJobs:
    """Tasks of one pool, all on one event loop."""

    def __init__(self) -> None:
        self._works: set[asyncio.Task[Any]] = set()
        self._reaping: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    def check_open(self) -> None:
        """Raises ``refused`` once `aclose` was called."""
        if self._is_closed:
            raise TransferError("the page pool is closed: the daemon is stopping", code="refused")

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs work until it is done or `aclose` cancels it; cancelling the caller cancels it as well."""
        task = self.spawn(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                self.check_open()
            task.cancel()
            raise

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts work that ends by itself, or is cancelled when the pool is closed."""
        task = asyncio.create_task(work)
        self._works.add(task)
        task.add_done_callback(self._works.discard)
        task.add_done_callback(looked_at)
        return task

    def finish(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts work that nothing cancels, because memory is in use until it ends; `aclose` waits for it."""
        task = asyncio.create_task(work)
        self._reaping.add(task)
        task.add_done_callback(self._reaping.discard)
        task.add_done_callback(looked_at)
        return task

    def after(self, transfer: Transfer | None, then: Callable[[], None]) -> None:
        """Cancels a transfer, and calls `then` when no byte of it can move; at once if none is pending."""
        if transfer is None or transfer.state != "pending":
            then()
            return
        with suppress(KvxferError):  # a closed agent's transfer ends without it
            transfer.cancel()
        # A task of its own: closing the pool waits for it, and does not cancel it.
        reaping = asyncio.create_task(_reaped(transfer, then))
        self._reaping.add(reaping)
        reaping.add_done_callback(self._reaping.discard)

    async def one_ended(self) -> bool:
        """Waits until one job has ended; returns False if there is none."""
        if not (tasks := self._works | self._reaping):
            return False
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return True

    def close(self) -> None:
        """Refuses new work."""
        self._is_closed = True

    async def aclose(self) -> None:
        """Refuses new work, cancels running work, and waits until that has given back all that it had."""
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
        pass  # the caller that posted it gets its error
    finally:
        then()


def looked_at(task: asyncio.Task[Any]) -> None:
    """Marks a task's exception as retrieved, so that asyncio does not warn if no caller awaits the task."""
    if not task.cancelled():
        task.exception()
