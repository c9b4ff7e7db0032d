"""News of several handles, of one agent or of several, for one waiter."""

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
    """Tells which of several handles have news, in the order in which the news come.

    A context manager for one waiter, which enters itself once for each handle: waiting for all of them costs
    as much as there are handles and news, no thread and no task. The first news are of every handle, since
    what happened before is not told.

    Parameters
    ----------
    places
        For each handle its agent's completions, its key, and the part of the key that is waited for.
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
        """Returns the indexes of handles that have news, when there are any."""
        import asyncio

        if not self._news:
            await self._sleep(asyncio.get_running_loop())
        return self._taken()

    def news_blocking(self, deadline: float | None) -> list[int]:
        """Returns the same; none when the time is over, by `time.monotonic`."""
        if not self._news:
            if len(self._agents) == 1:
                left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
                self._agents[0].block_until(lambda: bool(self._news), left_s)
            else:
                self._sleep_blocking(deadline)
        return self._taken()

    # ---- inside -----------------------------------------------------------------------------

    def _told(self, index: int) -> None:
        # In this order: who sleeps sets the wake first, and then looks for news once more.
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
        """Sleeps on the descriptors of several agents, as blocking calls of one agent do on one."""
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
