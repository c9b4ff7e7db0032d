"""The two worker processes of ``kvxfer bench latency``: one asks, the other answers."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

import kvxfer
from kvxfer.bench.errors import BenchError, CheckFailedError
from kvxfer.bench.latency.limit import LatencyLimitEnd, PingPong, WakeEnd
from kvxfer.bench.latency.measure import LatencyOptions
from kvxfer.bench.run.channel import Channel, Message
from kvxfer.bench.run.endpoint import LEASE_S, AgentEnd, Cache
from kvxfer.bench.work.page_data import PageFiller, page_keys

# The page that goes out, and the one that comes in.
_OUT, _IN = 0, 1
# How many polls between two looks at the clock.
_POLLS = 4096
# Filling and checking a page each time would measure cold caches.
_CHECK_EVERY = 50


class Latency(PingPong, AgentEnd):
    """Writes a page with a notification, and waits for the one that comes back."""

    #: The machine's limit, and bare wake-ups, once they are opened.
    bare: LatencyLimitEnd
    wakes: WakeEnd
    _notes: AsyncIterator[kvxfer.Notification] | None = None

    def __init__(self, fields: Message, coordinator: Channel, peers: list[Channel]) -> None:
        name = fields.pop("name")
        self.options = options = LatencyOptions(**fields)
        super().__init__(name, options.transport, coordinator)
        memory_kind = "foreign" if options.transport == "unix" else "pool"
        shape = (1, 2, options.nbytes)
        cache = Cache(self.agent, "kv", memory_kind, axes="lbd", shape=shape, dtype="uint8", num_blocks=2)
        self._region = cache.region
        self._pages = cache.pages(options.nbytes)
        self._filler = PageFiller(options.nbytes)
        self._src = np.array([_OUT], np.uint32)
        self._dst = np.array([_IN], np.uint32)

    def grant(self) -> None:
        self._region.grant(self.peer, [_IN], mode="write", ttl_s=LEASE_S)
        self._remote = self.peer.regions["kv"]

    def limit_open(self, end: int) -> None:
        """Meets the other end for the limit."""
        descriptors = self.coordinator.descriptors
        stream = socket.socket(fileno=descriptors.popleft())
        shared = descriptors.popleft() if self.options.transport == "shm" else None
        options = self.options
        self.bare = LatencyLimitEnd(end, options.wait, options.nbytes, options.timeout_s, shared, stream)

    def wake_open(self) -> None:
        """Takes the eventfds of bare wake-ups: the one that this end reads, and the one that it writes."""
        descriptors = self.coordinator.descriptors
        self.wakes = WakeEnd(descriptors.popleft(), descriptors.popleft(), self.options.timeout_s)

    def _send(self) -> None:
        self._last = self.agent.write(
            self._region, self._remote, self._src, self._dst, notify=b"page", timeout_s=self.options.timeout_s
        )

    def _end(self) -> Message:
        self._last.wait(self.options.timeout_s)
        return {"path": self._remote.path}

    async def _receive(self) -> None:
        if self.options.wait == "event":
            if self._notes is None:
                self._notes = self.agent.notifications()
            await anext(self._notes)
            return
        deadline = time.monotonic() + self.options.timeout_s
        while time.monotonic() < deadline:
            for _ in range(_POLLS):
                if self.agent.poll() and self.agent.take_notification() is not None:
                    return
        raise BenchError(f"no notification arrived within {self.options.timeout_s:g} s")

    def _fill(self, iteration: int, way: str) -> None:
        if iteration % _CHECK_EVERY == 0:
            self._filler.fill(self._pages, self._src, _keys(iteration, way))

    def _check(self, iteration: int, way: str) -> None:
        if iteration % _CHECK_EVERY:
            return
        if self.options.corrupt:
            self._pages[_IN].view(np.uint8)[-1] ^= 1
        wrong = self._filler.check(self._pages, self._dst, _keys(iteration, way))
        if wrong is not None:
            raise CheckFailedError(f"{way} of iteration {iteration}: {wrong}")


def _keys(iteration: int, way: str) -> Any:
    return page_keys(iteration, int(way == "answer"), num_pages=1)
