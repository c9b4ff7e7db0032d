"""The machine's limit for one small write: the shortest Python that hands bytes to another process.

Nothing of the engine takes part, and a notification is a word or a byte. Both ends wait as the ends of the
write beside them do. The bare wake-up, without Python, is measured apart (`_limits.wake_ups`).
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.bench import _limits
from kvxfer.bench.errors import BenchError, CheckFailedError
from kvxfer.bench.run import memory
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.limit import stream_pair
from kvxfer.bench.run.process import Worker

_RING = b"\1"
_MAX_RINGS = 64
_NUM_ENDS = 2
# Of a counter: one for each end, on a cache line of its own.
_LINE_NBYTES = 64
# How many looks between two at the clock.
_LOOKS = 4096


class PingPong:
    """One end that writes a page, and waits for one that comes back.

    Who derives from it has these: ``_fill`` makes a page that no other one is, for ``_check`` at the other
    end, both of the iteration and the way; ``_send``, and ``_receive``, which is awaited.
    """

    _fill: Any
    _check: Any
    _send: Any
    _receive: Any

    async def ask(self, first: int, count: int) -> Message:
        """Writes first, and returns how long each round trip took, and each call that writes."""
        round_trips_ns, posts_ns = [], []
        with self._watching():
            for iteration in range(first, first + count):
                self._fill(iteration, "ask")
                start_ns = time.perf_counter_ns()
                self._send()
                posts_ns.append(time.perf_counter_ns() - start_ns)
                await self._receive()
                round_trips_ns.append(time.perf_counter_ns() - start_ns)
                self._check(iteration, "answer")
        return {"round_trips_ns": round_trips_ns, "posts_ns": posts_ns, **self._end()}

    async def answer(self, first: int, count: int) -> Message:
        """Waits first; returns how long it held each page before it wrote one back."""
        held_ns = []
        with self._watching():
            for iteration in range(first, first + count):
                await self._receive()
                seen_ns = time.perf_counter_ns()
                self._check(iteration, "ask")
                self._fill(iteration, "answer")
                held_ns.append(time.perf_counter_ns() - seen_ns)
                self._send()
        return {"held_ns": held_ns, **self._end()}

    def _watching(self) -> AbstractContextManager[None]:
        """What is needed while pages go to and fro."""
        return nullcontext()

    def _end(self) -> Message:
        """Ends the last write; returns what else a reply has."""
        return {}


class SharedPath:
    """Shared memory, where a counter says that a page is there.

    `arrived` says whether the next page is here in full, and where it is takes it, as of `SocketPath`.
    """

    def __init__(self, shared: NDArray[np.uint8], nbytes: int, end: int) -> None:
        pages = shared[: _NUM_ENDS * nbytes].reshape(_NUM_ENDS, nbytes)
        counters = shared[_NUM_ENDS * nbytes :].view(np.uint64)[:: _LINE_NBYTES // 8]
        self._out, self._in = pages[end], pages[1 - end]
        # Views of one word: Python reads those faster than a number out of an array.
        self._sent = counters[end : end + 1].data
        self._heard = counters[1 - end : 2 - end].data
        self._next = 1

    def send(self, page: NDArray[np.uint8]) -> None:
        self._out[:] = page
        # x86 shows stores in their order; where a processor does not, the check finds old bytes.
        self._sent[0] += 1

    def arrived(self, page: NDArray[np.uint8]) -> bool:
        if self._heard[0] < self._next:
            return False
        self._next += 1
        page[:] = self._in
        return True


class SocketPath:
    """A connected stream that never blocks."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._missing = memoryview(b"")

    def send(self, page: NDArray[np.uint8]) -> None:
        left = page.data
        while left:
            try:
                left = left[self._stream.send(left) :]
            except BlockingIOError:
                continue  # the other end reads while it waits

    def arrived(self, page: NDArray[np.uint8]) -> bool:
        if not self._missing:
            self._missing = page.data
        try:
            count = self._stream.recv_into(self._missing)
        except BlockingIOError:
            return False
        if count == 0:
            raise BenchError("the other end of the limit closed its stream")
        self._missing = self._missing[count:]
        return not self._missing


class LatencyLimitEnd(PingPong):
    """One end, in its worker process.

    ``shared`` is a memfd for pages and counters; None where pages go over ``stream``.
    """

    def __init__(
        self, end: int, wait: str, nbytes: int, timeout_s: float, shared: int | None, stream: socket.socket
    ) -> None:
        stream.setblocking(False)
        self._stream = stream
        self._wait = wait
        self._timeout_s = timeout_s
        self._path: SharedPath | SocketPath = (
            SocketPath(stream)
            if shared is None
            else SharedPath(memory.map_shared(shared, shared_nbytes(nbytes)), nbytes, end)
        )
        # Nothing in memory wakes anybody.
        self._rings = wait == "event" and shared is not None
        self._page = np.zeros(nbytes, np.uint8)
        self._got = np.zeros(nbytes, np.uint8)
        self._readable: asyncio.Future[None] | None = None

    def close(self) -> None:
        """Ends the stream."""
        self._stream.close()

    def _fill(self, iteration: int, way: str) -> None:
        self._page.view(np.uint64)[[0, -1]] = iteration + 1

    def _check(self, iteration: int, way: str) -> None:
        found = self._got.view(np.uint64)[[0, -1]].tolist()
        if found != [iteration + 1] * 2:
            raise CheckFailedError(
                f"the limit itself moved wrong bytes: iteration {iteration + 1} brought {found}"
            )

    def _send(self) -> None:
        self._path.send(self._page)
        if self._rings:
            self._stream.send(_RING)

    async def _receive(self) -> None:
        if self._wait == "event":
            # No timeout: arming one for each page would be in the figure. The coordinator has its own.
            loop = asyncio.get_running_loop()
            while not self._path.arrived(self._got):
                self._readable = loop.create_future()
                await self._readable
                if self._rings:
                    with suppress(BlockingIOError):  # heard with the page before
                        self._stream.recv(_MAX_RINGS)
            return
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            for _ in range(_LOOKS):
                if self._path.arrived(self._got):
                    return
        raise BenchError(f"the limit's page did not arrive within {self._timeout_s:g} s")

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Has the event loop watch the stream, where it is to be woken."""
        if self._wait != "event":
            yield
            return
        loop = asyncio.get_running_loop()
        loop.add_reader(self._stream, self._on_readable)
        try:
            yield
        finally:
            loop.remove_reader(self._stream)

    def _on_readable(self) -> None:
        if self._readable is not None and not self._readable.done():
            self._readable.set_result(None)


class WakeEnd:
    """One end of bare wake-ups, over two eventfds."""

    def __init__(self, in_fd: int, out_fd: int, timeout_s: float) -> None:
        self._descriptors = in_fd, out_fd
        self._timeout_s = timeout_s

    def ask(self, count: int, processors: list[list[int]]) -> Message:
        """Wakes the other end first, then in turns; ``processors`` of this end and of the other one."""
        return self._take_turns(True, count, processors[0])

    def answer(self, count: int, processors: list[list[int]]) -> Message:
        """Is woken first."""
        return self._take_turns(False, count, processors[1])

    def _take_turns(self, first: bool, count: int, processors: list[int]) -> Message:
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, processors)  # this thread alone
        try:
            return {"wakes_ns": _limits.wake_ups(*self._descriptors, first, count, self._timeout_s)}
        finally:
            os.sched_setaffinity(0, allowed)


def shared_nbytes(nbytes: int) -> int:
    """Returns what both ends' pages of ``nbytes`` and their counters take."""
    return _NUM_ENDS * (nbytes + _LINE_NBYTES)


def open_limit(transport: str, nbytes: int, ends: Sequence[Worker]) -> None:
    """Has two workers meet for the limit of a transport."""
    shared = memory.create_shared(shared_nbytes(nbytes), "limit") if transport == "shm" else None
    streams = stream_pair("tcp" if transport == "tcp" else "unix")
    try:
        for end, (worker, stream) in enumerate(zip(ends, streams, strict=True)):
            passed = (stream.fileno(), *(() if shared is None else (shared,)))
            worker.call("limit_open", descriptors=passed, end=end)
    finally:
        for stream in streams:
            stream.close()
        if shared is not None:
            os.close(shared)


def open_wakes(ends: Sequence[Worker]) -> None:
    """Gives each of two workers the eventfd that it reads and the one that it writes."""
    descriptors = [os.eventfd(0) for _ in ends]
    try:
        for worker, passed in zip(ends, (descriptors, descriptors[::-1]), strict=True):
            worker.call("wake_open", descriptors=tuple(passed))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
