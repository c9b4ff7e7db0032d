"""watch: one waiter sleeps for handles of several agents, and gets the events of each."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any

import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

from kvxfer.agent import Agent
from kvxfer.session.completion import ALL_LAYERS
from kvxfer.session.watch import Watch


@pytest.fixture
def two(fake_core: list[Any]) -> tuple[list[Any], Watch]:
    agents = [Agent(name) for name in ("prefill", "decode")]
    places = [(agent._completions, ("handle", at), ALL_LAYERS) for at, agent in enumerate(agents)]
    return fake_core, Watch(places)


def test_the_first_news_are_of_all_and_none_come_when_the_time_is_over(two: tuple[list[Any], Watch]) -> None:
    cores, watch = two
    with watch:
        assert [core.num_waiters for core in cores] == [1, 1]
        assert watch.news_blocking(None) == [0, 1]
        assert watch.news_blocking(time.monotonic()) == []
    assert [core.num_waiters for core in cores] == [0, 0]


@pytest.mark.parametrize("by", ["the ring", "another thread"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_thread_sleeps_until_one_of_the_agents_has_news(
    two: tuple[list[Any], Watch], by: str, at: int
) -> None:
    cores, watch = two
    heard: list[int] = []
    with watch:
        watch.news_blocking(None)
        # Without bound: a wake-up that is lost is a thread that never ends.
        thread = threading.Thread(target=lambda: heard.extend(watch.news_blocking(None)), daemon=True)
        thread.start()
        while not all(core.armed for core in cores):
            os.sched_yield()
        if by == "the ring":
            cores[at].happen("ended", handle=at)
        else:
            watch._told(at)  # as by a thread that has drained the ring
        thread.join(60)
        assert heard == [at]


async def test_a_loop_hears_of_both(two: tuple[list[Any], Watch]) -> None:
    cores, watch = two
    with watch:
        assert await watch.news() == [0, 1]
        for at in (1, 0):
            waiting = asyncio.ensure_future(watch.news())
            await asyncio.sleep(0)
            cores[at].happen("ended", handle=at)
            assert await waiting == [at]
        waiting = asyncio.ensure_future(watch.news())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        watch._told(1)
        assert await watch.news() == [1]
