"""A directory for agents of one process: for tests, and for engines that share a process."""

from __future__ import annotations

import heapq
import math
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvxfer.directory.change import Change, ChangeKind, Pending
from kvxfer.directory.entry import Entry
from kvxfer.errors import NoAnswerError, PeerError, invalid, listed

if TYPE_CHECKING:
    from concurrent.futures import Future

_NEVER: Final = math.inf
# Deadlines of removed entries are kept until there are this many more deadlines than entries.
_SPARE_DEADLINES: Final = 64


@dataclass(slots=True)
class _Held:
    """An entry, the time when it ends, and the earliest time when `InProcessDirectory` checks that."""

    entry: Entry
    ends_at: float = _NEVER
    looked_at: float = _NEVER


class InProcessDirectory:
    """Entries in a dictionary. Thread-safe; see `kvxfer.directory.Directory`.

    It has no thread: the next call removes entries whose time is over, and waiters sleep at most until the
    next entry ends.

    Parameters
    ----------
    clock
        Monotonic clock in seconds, for ``ttl_s``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._deadlines: list[tuple[float, str]] = []  # a heap; one or more for each entry that ends
        self._waiting: dict[str, list[Future[Entry]]] = {}
        self._watches: weakref.WeakSet[_Watch] = weakref.WeakSet()
        self._ended = ""

    def __repr__(self) -> str:
        return f"<InProcessDirectory {listed((entry.name for entry in self.list()), 'empty')}>"

    def publish(self, entry: Entry, ttl_s: float | None = None, *, replace: bool = True) -> bool:
        """Makes `entry` the one of its name, and wakes its waiters."""
        # `not >` also refuses NaN.
        if ttl_s is not None and not ttl_s > 0:
            raise invalid(f"ttl_s must be a positive number of seconds, not {ttl_s!r}")
        with self._lock:
            now = self._forget_ended()
            held = self._held.get(entry.name)
            if held is not None and not replace and held.entry.incarnation != entry.incarnation:
                return False
            if held is None:
                held = self._held[entry.name] = _Held(entry)
                self._tell(ChangeKind.ADDED, entry)
            elif held.entry != entry:
                held.entry = entry
                self._tell(ChangeKind.CHANGED, entry)
            held.ends_at = _NEVER if ttl_s is None else now + ttl_s
            self._look_at(held)
            waiting = self._waiting.pop(entry.name, [])
        for future in waiting:
            # False: the waiter has given up meanwhile.
            if future.set_running_or_notify_cancel():
                future.set_result(entry)
        return True

    def withdraw(self, name: str, incarnation: bytes) -> None:
        """Removes the entry of `name` if it is this incarnation's."""
        with self._lock:
            self._forget_ended()
            held = self._held.get(name)
            if held is not None and held.entry.incarnation == incarnation:
                self._forget(held)

    async def resolve(self, name: str, timeout_s: float) -> Entry:
        """Returns the entry of `name`, waiting for it to be published."""
        import asyncio

        future = self._ask(name)
        try:
            if future.done():
                return future.result()
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
        except TimeoutError:
            raise self._unknown(name) from None
        finally:
            self._stop_asking(name, future)

    def resolve_blocking(self, name: str, timeout_s: float) -> Entry:
        """Returns the entry of `name`, blocking until it is published."""
        future = self._ask(name)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            raise self._unknown(name) from None
        finally:
            self._stop_asking(name, future)

    def list(self, prefix: str = "") -> tuple[Entry, ...]:
        """Returns the entries whose names begin with `prefix`, in the order of their names."""
        with self._lock:
            self._forget_ended()
            return tuple(held.entry for name, held in sorted(self._held.items()) if name.startswith(prefix))

    def watch(self, prefix: str = "", timeout_s: float | None = None) -> AsyncIterator[Change]:
        """Yields changes of entries whose names begin with `prefix`, for one reader."""
        return self._watch(prefix, timeout_s)

    def watch_blocking(self, prefix: str = "", timeout_s: float | None = None) -> Iterator[Change]:
        """Yields the same, blocking until there are any."""
        return self._watch(prefix, timeout_s)

    def end(self, why: str) -> None:
        """Raises `PeerError` (``unreachable``) with `why` in all present and future waits."""
        with self._lock:
            self._ended = why
            waiting = [future for futures in self._waiting.values() for future in futures]
            for watch in self._watches:
                watch.wake()
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(PeerError(why, code="unreachable"))

    # ---- those who wait ---------------------------------------------------------------------

    def _ask(self, name: str) -> Future[Entry]:
        from concurrent.futures import Future  # it imports logging

        future: Future[Entry] = Future()
        with self._lock:
            self._forget_ended()
            held = self._held.get(name)
            if held is None:
                if self._ended:
                    raise PeerError(self._ended, code="unreachable", peer=name)
                self._waiting.setdefault(name, []).append(future)
        if held is not None:
            future.set_result(held.entry)
        return future

    def _stop_asking(self, name: str, future: Future[Entry]) -> None:
        future.cancel()
        with self._lock:
            waiting = self._waiting.get(name)
            if waiting is not None and future in waiting:
                waiting.remove(future)
                if not waiting:
                    del self._waiting[name]

    def _unknown(self, name: str) -> NoAnswerError:
        known = listed((entry.name for entry in self.list()), "nobody")
        return NoAnswerError(
            f"agent {name!r} was not published in time (known: {known})", code="no-answer", peer=name
        )

    def _watch(self, prefix: str, timeout_s: float | None) -> _Watch:
        watch = _Watch(self, prefix, timeout_s)
        with self._lock:
            self._forget_ended()
            for name, held in self._held.items():
                if name.startswith(prefix):
                    watch.pending.add(ChangeKind.ADDED, held.entry)
            self._watches.add(watch)
        return watch

    def _news(self, watch: _Watch) -> Change | tuple[Future[None], float]:
        """Returns the next change; or a future to sleep on, and the time until an entry ends."""
        from concurrent.futures import Future

        with self._lock:
            now = self._forget_ended()
            if (change := watch.pending.take()) is not None:
                return change
            if self._ended:
                raise PeerError(self._ended, code="unreachable")
            watch.waiter = Future()
            return watch.waiter, self._deadlines[0][0] - now if self._deadlines else _NEVER

    # ---- under the lock ---------------------------------------------------------------------

    def _tell(self, kind: ChangeKind, entry: Entry) -> None:
        for watch in self._watches:
            if entry.name.startswith(watch.prefix):
                watch.pending.add(kind, entry)
                watch.wake()

    def _look_at(self, held: _Held) -> None:
        """Ensures a check when an entry ends: at that time, or at an earlier time that sets a new check."""
        if held.ends_at >= held.looked_at:
            return
        if len(self._deadlines) > 2 * len(self._held) + _SPARE_DEADLINES:
            self._deadlines = [
                (each.looked_at, name) for name, each in self._held.items() if each.looked_at < _NEVER
            ]
            heapq.heapify(self._deadlines)
        held.looked_at = held.ends_at
        is_first = not self._deadlines or held.ends_at < self._deadlines[0][0]
        heapq.heappush(self._deadlines, (held.ends_at, held.entry.name))
        if is_first:
            for watch in self._watches:
                watch.wake()  # its sleep would be too long

    def _forget_ended(self) -> float:
        """Removes the entries whose time is over; returns the present time."""
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            looked_at, name = heapq.heappop(self._deadlines)
            held = self._held.get(name)
            if held is None or held.looked_at != looked_at:
                continue  # the entry is gone, or has another check
            if held.ends_at <= now:
                self._forget(held)
            else:
                held.looked_at = _NEVER
                self._look_at(held)
        return now

    def _forget(self, held: _Held) -> None:
        del self._held[held.entry.name]
        self._tell(ChangeKind.REMOVED, held.entry)


class _Watch:
    """One reader's pending changes of an `InProcessDirectory`, and the reader's sleep."""

    def __init__(self, directory: InProcessDirectory, prefix: str, timeout_s: float | None) -> None:
        self.prefix = prefix
        self.pending = Pending()
        self.waiter: Future[None] | None = None
        self._directory = directory
        self._timeout_s = _NEVER if timeout_s is None else timeout_s

    def wake(self) -> None:
        """Ends the reader's sleep. Called under the directory's lock; no sleep's callback takes that lock."""
        waiter, self.waiter = self.waiter, None
        if waiter is not None and waiter.set_running_or_notify_cancel():
            waiter.set_result(None)

    def __iter__(self) -> _Watch:
        return self

    def __next__(self) -> Change:
        until = time.monotonic() + self._timeout_s
        while not isinstance(news := self._directory._news(self), Change):
            waiter, wait_s = news
            sleep_s = self._sleep_s(until, wait_s)
            try:
                waiter.result(sleep_s)
            except TimeoutError:
                pass  # an entry may have ended; else _sleep_s says so
        return news

    def __aiter__(self) -> _Watch:
        return self

    async def __anext__(self) -> Change:
        import asyncio

        until = time.monotonic() + self._timeout_s
        while not isinstance(news := self._directory._news(self), Change):
            waiter, wait_s = news
            sleep_s = self._sleep_s(until, wait_s)
            try:
                await asyncio.wait_for(asyncio.wrap_future(waiter), sleep_s)
            except TimeoutError:
                pass
        return news

    def _sleep_s(self, until: float, wait_s: float) -> float | None:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"no entry of {self.prefix!r}* changed within {self._timeout_s:g} s")
        sleep_s = min(left_s, max(wait_s, 0.0))
        return None if sleep_s == _NEVER else sleep_s
