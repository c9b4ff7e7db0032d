"""Lets one waiter watch the events of several handles, of one agent or of several."""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from kvxfer.session.bell import Bell
from kvxfer.session.completion import LOOK_AGAIN_S, Completions, Key, Wake, nap_s, resolve

if TYPE_CHECKING:
    import asyncio


class Watch:
    """Reports which of several handles have events, in the order of the events.

    A context manager for one waiter. It registers once for each handle, so the cost of waiting grows with the
    handles and their events, without threads or tasks. The first report names every handle, because earlier
    events are not reported.

    Parameters
    ----------
    places
        For each handle: its agent's completions, its key, and the part of the key to wait for.
    """

    def __init__(self, places: Sequence[tuple[Completions, Key, int]]) -> None:
        self._entries = [(*place, partial(self._told, index)) for index, place in enumerate(places)]
        self._agents = tuple(dict.fromkeys(completions for completions, _, _ in places))
        self._news = deque(range(len(places)))
        self._wake: Wake | None = None

    def __enter__(self) -> Watch:
        for completions, key, part, wake in self._entries:
            completions.enter(key, part, wake)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for completions, key, part, wake in self._entries:
            completions.leave(key, part, wake)

    async def news(self) -> list[int]:
        """Waits for events, and returns the indexes of the handles that have them."""
        import asyncio

        if not self._news:
            await self._sleep(asyncio.get_running_loop())
        return self._taken()

    def news_blocking(self, deadline: float | None) -> list[int]:
        """Blocks and returns the same; returns none at the deadline, by `time.monotonic`."""
        if not self._news:
            if len(self._agents) == 1:
                left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
                self._agents[0].block_until(lambda: bool(self._news), left_s)
            else:
                self._sleep_blocking(deadline)
        return self._taken()

    # ---- inside -----------------------------------------------------------------------------

    def _told(self, index: int) -> None:
        # Keep this order: a sleeper first sets its wake, and then checks for events once more.
        self._news.append(index)
        if (wake := self._wake) is not None:
            wake()

    def _taken(self) -> list[int]:
        return [self._news.popleft() for _ in range(len(self._news))]

    async def _sleep(self, loop: asyncio.AbstractEventLoop) -> None:
        for agent in self._agents:
            agent.watch(loop)
        future: asyncio.Future[None] = loop.create_future()
        self._wake = partial(resolve, loop, future)
        try:
            if not self._news:
                await future
        finally:
            self._wake = None

    def _sleep_blocking(self, deadline: float | None) -> None:
        """Sleeps on the descriptors of several agents; blocking calls of one agent sleep on one."""
        bell = Bell()
        self._wake = bell.ring
        agents = [agent for agent in self._agents if not agent.lost]
        poller = select.poll()
        if bell.fd >= 0:
            poller.register(bell.fd, select.POLLIN)
        for agent in agents:
            poller.register(agent.core.event_fd, select.POLLIN)
            agent.sleepers(1)
        try:
            while True:
                for agent in agents:
                    agent.drain()
                left_s = None if deadline is None else deadline - time.monotonic()
                if self._news or (left_s is not None and left_s <= 0):
                    return
                if bell.fd < 0:
                    left_s = LOOK_AGAIN_S if left_s is None else min(left_s, LOOK_AGAIN_S)
                poller.poll(nap_s(left_s) * 1000)
        finally:
            self._wake = None
            for agent in agents:
                agent.sleepers(-1)
            bell.close()
