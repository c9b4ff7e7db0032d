"""The prefill process of ``kvxfer bench handover``, and what it has in common with decode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import numpy as np

from kvxfer.bench.handover.measure import HandoverOptions
from kvxfer.bench.handover.request_pages import RequestPages
from kvxfer.bench.run.channel import Channel, Message
from kvxfer.bench.run.endpoint import AgentEnd
from kvxfer.bench.work.page_data import Indices


class HandoverEnd(AgentEnd):
    """What both processes share: an agent, a cache, the requests' pages, and a channel to the other end."""

    def __init__(self, role: str, fields: Message, coordinator: Channel, peers: list[Channel]) -> None:
        self.options = options = HandoverOptions(**fields)
        super().__init__(role, options.transport, coordinator, peers)
        # Seeds of its own, so that the two processes do not name blocks in the same order.
        seed = options.seed + (role == "decode")
        self.pages = RequestPages(self.agent, options.shape(), options.num_blocks(), seed)
        self.page_kind = self.pages.cache.page_kind
        (self.other,) = peers
        self._spent_ns = 0

    def usage(self) -> Message:
        """Processor time of all runs without filling and checking pages."""
        return {"cpu_ns": self._spent_ns - self.pages.cpu_ns}


class Prefill(HandoverEnd):
    """Computes requests layer by layer at a pace, and hands their pages to decode.

    Push: decode has named its blocks; each layer is released as soon as it is final. Pull: decode
    is told the blocks when the last layer is final, under a lease to read them.
    """

    def __init__(self, fields: Message, coordinator: Channel, peers: list[Channel]) -> None:
        super().__init__("prefill", fields, coordinator, peers)
        # So many requests fit the pool.
        self._room = asyncio.Semaphore(self.options.concurrency)
        #: request -> resolved with the time at which decode's notification came (pull).
        self._read: dict[bytes, asyncio.Future[int]] = {}

    async def run(self, requests: list[Message]) -> None:
        """Serves as many requests as decode asks for them, and as blocks become free.

        Decode may go on before this end has heard that its last request is there.
        """
        start_ns = time.process_time_ns()
        serve_one = self._push if self.options.mode == "push" else self._pull
        watcher = asyncio.create_task(self._watch()) if self.options.mode == "pull" else None
        async with asyncio.TaskGroup() as group:
            for _ in requests:
                asked = await self.other.receive_async()
                await self._room.acquire()
                task = group.create_task(serve_one(asked))
                task.add_done_callback(lambda _: self._room.release())
        if watcher is not None:
            watcher.cancel()
        self._spent_ns += time.process_time_ns() - start_ns

    async def _push(self, asked: Message) -> None:
        request = asked["request"]
        blocks = self.pages.allocate(request, asked["tokens"])
        post_ns = time.monotonic_ns()
        transfer = self.agent.write(
            self.pages.cache.region,
            self.peer.regions["kv"],
            src_blocks=blocks,
            dst_blocks=np.asarray(asked["blocks"], dtype=np.uint32),
            notify=tag(request),
            hold=True,
            timeout_s=self.options.timeout_s,
        )
        released_ns = []
        async for layer in self._layers(request, blocks):
            released_ns.append(time.monotonic_ns())
            transfer.release(layer + 1)
        await transfer
        self.pages.cache.free(blocks)
        self.coordinator.send(
            "request",
            request=request,
            post_ns=post_ns,
            released_ns=released_ns,
            prefill_end_ns=released_ns[-1],
        )

    async def _pull(self, asked: Message) -> None:
        request = asked["request"]
        blocks = self.pages.allocate(request, asked["tokens"])
        async for _ in self._layers(request, blocks):
            pass
        end_ns = time.monotonic_ns()
        read = self._read[tag(request)] = asyncio.get_running_loop().create_future()
        region = self.pages.cache.region
        lease = region.grant(self.peer, blocks=blocks, mode="read", ttl_s=self.options.timeout_s)
        # The word may overtake the grant, and these blocks were another request's a moment ago: the token
        # says which lease is meant.
        self.other.send("ready", request=request, blocks=blocks.tolist(), lease=str(lease.token))
        # Decode's notification: it has every page. Revoking fences, and the blocks can be used again.
        async with asyncio.timeout(self.options.timeout_s):
            notification_ns = await read
        del self._read[tag(request)]
        await lease.revoke()
        self.pages.cache.free(blocks)
        self.coordinator.send(
            "request", request=request, prefill_end_ns=end_ns, notification_ns=notification_ns
        )

    async def _layers(self, request: int, blocks: Indices) -> AsyncIterator[int]:
        """Computes the layers in order, each when it is due; yields the one that is final now."""
        due_s = time.monotonic()
        for layer in range(self.options.shape().num_layers):
            due_s += self.options.prefill_ms_per_layer / 1e3
            self.pages.fill_layer(request, layer, blocks)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            yield layer

    async def _watch(self) -> None:
        async for note in self.agent.notifications():
            future = self._read.get(note.payload)
            if future is not None and not future.done():
                future.set_result(time.monotonic_ns())


def tag(request: int) -> bytes:
    """Returns the notification that goes with a request's pages."""
    return b"request-%d" % request
