"""The bare hand-over that `bench latency` is held against: real sockets, memory and event loops."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator

import pytest

from kvxfer.bench.errors import CheckFailedError
from kvxfer.bench.latency.limit import LatencyLimitEnd, shared_nbytes
from kvxfer.bench.run import memory


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[LatencyLimitEnd, LatencyLimitEnd]]:
    """Both ends of shared memory (None), or of a stream of pages of so many bytes; both are woken."""
    nbytes: int | None = request.param
    memfds: list[int | None] = [None, None]
    if nbytes is None:
        nbytes = 4096
        memfd = memory.create_shared(shared_nbytes(nbytes), "limit")
        memfds = [memfd, os.dup(memfd)]
    pairs = enumerate(zip(memfds, socket.socketpair(), strict=True))
    near, far = (
        LatencyLimitEnd(end, "event", nbytes, timeout_s=10.0, shared=memfd, stream=stream)
        for end, (memfd, stream) in pairs
    )
    yield near, far
    near.close()
    far.close()
    for descriptor in memfds:
        if descriptor is not None:
            os.close(descriptor)


# Two polling ends would wait for each other on one thread; the commands' tests cover them.
@pytest.mark.parametrize("ends", [None, 4096, 1 << 22], indirect=True, ids=["shared", "stream", "in parts"])
def test_every_page_goes_there_and_back(ends: tuple[LatencyLimitEnd, LatencyLimitEnd]) -> None:
    near, far = ends

    async def both() -> None:
        for first, count in ((0, 5), (5, 3)):
            # A page that does not fit is sent by its own thread, while the other end reads.
            asking = asyncio.to_thread(asyncio.run, near.ask(first, count))
            asked, answered = await asyncio.gather(asking, far.answer(first, count))
            assert len(asked["round_trips_ns"]) == len(answered["held_ns"]) == count
            assert min(asked["round_trips_ns"]) > min(answered["held_ns"]) > 0

    asyncio.run(both())


@pytest.mark.parametrize("ends", [None], indirect=True)
def test_old_bytes_are_not_taken_for_new_ones(ends: tuple[LatencyLimitEnd, LatencyLimitEnd]) -> None:
    near, far = ends
    near._fill = lambda iteration, way: None  # type: ignore[method-assign]

    async def both() -> None:
        with pytest.raises(CheckFailedError, match=r"iteration 1 brought \[0, 0\]"):
            await asyncio.gather(near.ask(0, 1), far.answer(0, 1))

    asyncio.run(both())
