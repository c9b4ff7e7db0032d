"""A thread with its own event loop, for work that goes on while callers block."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from kvxfer.threads import start_thread

_T = TypeVar("_T")


class LoopThread:
    """Runs coroutines for other threads, and sleeps while there are none.

    The class's own coroutines must run on its loop.

    Parameters
    ----------
    name
        The thread's name.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._asking: set[asyncio.Future[Any]] = set()
        self._thread = start_thread(_run, name, self._loop)

    @property
    def is_running(self) -> bool:
        """Whether the thread accepts calls."""
        return self._thread.is_alive()

    def start(self, call: Coroutine[Any, Any, object]) -> None:
        """Starts a coroutine, and returns at once. The coroutine itself must report its errors."""
        asyncio.run_coroutine_threadsafe(call, self._loop)

    def call(self, call: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
        """Runs a coroutine and returns what it returns.

        Raises
        ------
        TimeoutError
            It did not return in time, and was cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    async def answer(self, call: Coroutine[Any, Any, _T]) -> _T:
        """Returns the result of a remote call, on the loop. Cancelling the caller does not cancel the call.

        The reason: libraries leak a connection whose opening is cancelled.
        """
        asking = asyncio.ensure_future(call)
        self._asking.add(asking)
        asking.add_done_callback(self._has_answered)
        return await asyncio.shield(asking)

    async def all_answered(self) -> None:
        """Waits until all calls of `answer` have ended, on the loop."""
        await asyncio.gather(*self._asking, return_exceptions=True)

    def close(self, timeout_s: float) -> None:
        """Cancels all running coroutines, and ends the thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)

    def _has_answered(self, asking: asyncio.Future[Any]) -> None:
        self._asking.discard(asking)
        if not asking.cancelled():
            asking.exception()  # marks the exception as retrieved, because there may be no waiter


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        for task in (tasks := asyncio.all_tasks(loop)):
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
