"""The bare hand-over that `bench latency` is held against: real sockets, memory and event loops."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from kvxfer.bench.errors import BenchError, CheckFailedError
from kvxfer.bench.latency.limit import LatencyLimitEnd, shared_nbytes
from kvxfer.bench.run import memory

_NBYTES = 4096


def ends_of(shared: bool, wait: str, nbytes: int = _NBYTES) -> tuple[LatencyLimitEnd, LatencyLimitEnd]:
    near, far = socket.socketpair()
    memfds: list[int | None] = [None, None]
    if shared:
        memfd = memory.create_shared(shared_nbytes(nbytes), "limit")
        memfds = [memfd, os.dup(memfd)]
    ends = [
        LatencyLimitEnd(end, wait, nbytes, timeout_s=10.0, shared=memfds[end], stream=stream)
        for end, stream in enumerate((near, far))
    ]
    for descriptor in memfds:
        if descriptor is not None:
            os.close(descriptor)
    return ends[0], ends[1]


@pytest.mark.parametrize("shared", [False, True], ids=["stream", "shared"])
def test_every_page_goes_there_and_back(shared: bool) -> None:
    # Two ends that poll would wait for each other on one thread; the commands' tests have them.
    near, far = ends_of(shared, "event")

    async def both() -> None:
        for count in (20, 5):
            asked, answered = await asyncio.gather(near.ask(count), far.answer(count))
            assert len(asked) == len(answered) == count
            assert min(asked) > min(answered) > 0

    asyncio.run(both())
    near.close()
    far.close()


def test_a_page_larger_than_the_socket_takes_goes_in_parts() -> None:
    near, far = ends_of(False, "event", nbytes=1 << 22)

    async def both() -> None:
        # A page that does not fit is sent by a thread of its own: the other end reads meanwhile.
        await asyncio.gather(asyncio.to_thread(asyncio.run, near.ask(3)), far.answer(3))

    asyncio.run(both())
    near.close()
    far.close()


def test_old_bytes_are_not_taken_for_new_ones() -> None:
    near, far = ends_of(True, "event")
    near._mark = lambda: None  # type: ignore[method-assign]

    async def both() -> None:
        with pytest.raises(CheckFailedError, match=r"iteration 1 brought \[0, 0\]"):
            await asyncio.gather(near.ask(1), far.answer(1))

    asyncio.run(both())
    near.close()
    far.close()


def test_an_end_that_goes_is_said() -> None:
    near, far = ends_of(False, "event")
    far.close()

    async def ask() -> None:
        with pytest.raises((BenchError, OSError)):
            await near.ask(1)

    asyncio.run(ask())
    near.close()
