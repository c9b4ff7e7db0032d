"""Threads of kvxfer take no signal that is sent to the process.

The program decides which of its threads takes a signal, by a handler or by `signal.sigwait`. A thread that
takes all signals would take one that every thread of the program has blocked, and end the process.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    import asyncio

_T = TypeVar("_T")

# As native/core/system/signals_blocked.h: not those that a thread causes itself.
_TAKEN_BY_OTHERS: Final = signal.valid_signals() - {
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL),
    *(signal.SIGTRAP, signal.SIGSYS, signal.SIGABRT),
}


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Threads that start meanwhile take no signals; nor does the calling thread until the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TAKEN_BY_OTHERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_thread(run: Callable[..., object], name: str, *args: Any) -> threading.Thread:
    """Starts a thread that does not keep the process alive."""
    thread = threading.Thread(target=run, args=args, name=name, daemon=True)
    with signals_blocked():
        thread.start()
    return thread


async def in_thread(call: Callable[..., _T], *args: Any) -> _T:
    """Returns what `call` returns in a thread of its own. Cancelling abandons only the waiting."""
    import asyncio  # most programs that wait so have it by then

    loop = asyncio.get_running_loop()
    answer: asyncio.Future[_T] = loop.create_future()

    def tell(value: _T | None, error: BaseException | None) -> None:
        if answer.done():
            return  # nobody waits
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, error = None, None
        try:
            value = call(*args)
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, value, error)

    start_thread(run, "kvxfer-call")
    return await answer
