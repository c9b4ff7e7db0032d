"""Pages that move between a pool's memory and a directory's files, as many at a time as the files take."""

from __future__ import annotations

import hashlib
import resource
import select
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

import kvxfer
from kvxfer._native import PAGE_FILE_BLOCK_NBYTES, PageFiles
from kvxfer.bench.errors import CheckFailedError
from kvxfer.bench.run import memory
from kvxfer.bench.run.stats import GIB
from kvxfer.bench.store.fio import Way

# Twice as many as a tier's threads: one that ends finds the next already waiting.
_WINDOW: Final = 32
_WAIT_MS: Final = 30_000
_CLOSE_S: Final = 30.0
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


@dataclass(slots=True)
class _Stream:
    """Pages that are still to move one way, and free places for them in the pool's memory."""

    way: Way
    numbers: Iterator[int]
    free: list[int]
    moved: int = 0
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Moved:
    """What a stretch of traffic came to; the processor time is the whole process's, and the caller's part."""

    gb_s: dict[Way, float]
    cpu_s_per_gib: float
    caller_cpu_s_per_gib: float


class PageTraffic:
    """Files with room for some pages of one size, all of them full, and memory from which pages go and come.

    A page's number is its key and is in each of its blocks. As in a daemon that has run for long, each new
    page takes the place of the oldest one.
    """

    def __init__(
        self, directory: Path, num_pages: int, page_nbytes: int, seed: int, *, huge_pages: bool = True
    ) -> None:
        self._num_pages, self._page_nbytes = num_pages, page_nbytes
        self._window = max(min(_WINDOW, num_pages // 8), 1)
        self._files = PageFiles(str(directory), num_pages * page_nbytes, [0])
        self._chance = np.random.default_rng(seed)
        words = page_nbytes // 8
        self._body = self._chance.integers(0, 1 << 63, words, dtype=np.uint64)
        self._blocks = np.arange(page_nbytes // PAGE_FILE_BLOCK_NBYTES, dtype=np.uint64)
        self._pool = kvxfer.Pool(2 * self._window, page_nbytes, name="bench-store", huge_pages=huge_pages)
        self._pages = self._pool.array((2 * self._window, words), np.uint64)
        self._pages[:] = self._body
        self._address = memory.address_of(self._pages.view(np.uint8))
        self._stamps = self._pages[:, :: PAGE_FILE_BLOCK_NBYTES // 8]
        self._readable = select.poll()
        self._readable.register(self._files.event_fd, select.POLLIN)
        self._next = 0  # numbers ascend as pages are written
        # None of this quarter is overwritten: it and the pages used since it was written are fewer than all.
        self._lately: deque[int] = deque(maxlen=max(num_pages // 4, 1))
        self._digests: dict[int, bytes] = {}
        self._running: dict[int, tuple[_Stream, int, int]] = {}  # by ticket: with the page's place and number
        self._last_ticket = 0
        self._checks = False

    @property
    def why_not_direct(self) -> str:
        """Why pages go through the page cache; "" if they do not."""
        return self._files.why_not_direct

    @property
    def page_kind(self) -> str:
        """The kind of the memory's pages."""
        return self._pool.page_kind

    def write_all(self) -> Moved:
        """Replaces every page with a new one."""
        return self._move([self._stream("write", self._new(self._num_pages))])

    def read_all(self, *, checks: bool = False) -> Moved:
        """Reads every page once, in random order; compares each byte if it ``checks``."""
        there, lately = range(self._next - self._num_pages, self._next), set(self._lately)
        # Those that `both` begins with are read last, so that they are the last to be overwritten.
        order = [
            *self._chance.permutation([each for each in there if each not in lately]).tolist(),
            *self._chance.permutation(list(lately)).tolist(),
        ]
        self._checks = checks
        try:
            return self._move([self._stream("read", order)])
        finally:
            self._checks = False

    def both(self, duration_s: float) -> Moved:
        """Reads pages that were written lately while it writes new ones, both without pause."""
        return self._move(
            [self._stream("read", self._recent()), self._stream("write", self._new(1 << 40))], duration_s
        )

    def close(self) -> None:
        """Ends the files' threads, and gives the memory back."""
        if not self._files.close(_CLOSE_S):
            raise CheckFailedError(f"the disk still moves pages after {_CLOSE_S:g} s")
        del self._pages, self._stamps
        self._pool.close()

    def _new(self, count: int) -> Iterator[int]:
        for _ in range(count):
            # Older ones were overwritten long ago.
            self._digests.pop(self._next - 2 * self._num_pages - 2 * self._window, None)
            self._digests[self._next] = _digest(self._next)
            self._next += 1
            yield self._next - 1

    def _recent(self) -> Iterator[int]:
        while True:
            for place in self._chance.integers(0, len(self._lately), 256).tolist():
                yield self._lately[place]

    def _stream(self, way: Way, numbers: Iterable[int]) -> _Stream:
        first = 0 if way == "write" else self._window
        return _Stream(way, iter(numbers), list(range(first, first + self._window)))

    def _move(self, streams: list[_Stream], duration_s: float = float("inf")) -> Moved:
        """Moves pages until the streams are over, or the time is."""
        before, started = _cpu_s(), time.perf_counter()
        until = started + duration_s
        while True:
            for stream in streams:
                while stream.free and not stream.is_over:
                    self._begin(stream)
            if not self._running or time.perf_counter() >= until:
                break
            self._collect()
        took_s, after = time.perf_counter() - started, _cpu_s()
        moved = {stream.way: stream.moved * self._page_nbytes for stream in streams}
        while self._running:
            self._collect()
        process, caller = (
            (end - begin) / sum(moved.values()) * GIB for begin, end in zip(before, after, strict=True)
        )
        return Moved({way: nbytes / took_s / 1e9 for way, nbytes in moved.items()}, process, caller)

    def _begin(self, stream: _Stream) -> None:
        number = next(stream.numbers, None)
        if number is None:
            stream.is_over = True
            return
        place = stream.free.pop()
        address = self._address + place * self._page_nbytes
        self._last_ticket += 1
        ticket, digest = self._last_ticket, self._digests[number]
        if stream.way == "write":
            self._stamps[place] = self._stamps_of(number)
            answer = self._files.write(digest, 0, str(number), address, self._page_nbytes, False, ticket)
        else:
            if self._checks:
                self._pages[place] = 0
            answer = self._files.read(digest, address, self._page_nbytes, 0.0, ticket)
        if answer != "begun":
            raise CheckFailedError(f"{stream.way} of page {number}: the files answered {answer}")
        self._running[ticket] = stream, place, number

    def _collect(self) -> None:
        if not self._readable.poll(_WAIT_MS):
            raise CheckFailedError(f"no page has come or gone for {_WAIT_MS / 1e3:g} s")
        for ticket, how, error in self._files.take_ended()[0]:
            stream, place, number = self._running.pop(ticket)
            if how != "done":
                raise CheckFailedError(f"{stream.way} of page {number} ended as {how} (errno {error})")
            if self._checks:
                self._check(place, number)
            if stream.way == "write":
                self._lately.append(number)
            stream.free.append(place)
            stream.moved += 1

    def _check(self, place: int, number: int) -> None:
        expected = self._body.copy()
        expected[:: PAGE_FILE_BLOCK_NBYTES // 8] = self._stamps_of(number)
        if not np.array_equal(self._pages[place], expected):
            raise CheckFailedError(f"page {number} is not what was written")

    def _stamps_of(self, number: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return self._blocks * _GOLDEN + np.uint64(number)


def _digest(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def _cpu_s() -> tuple[float, float]:
    """Returns the processor time of this process, and of this thread."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_THREAD)]
    process, thread = (each.ru_utime + each.ru_stime for each in used)
    return process, thread
