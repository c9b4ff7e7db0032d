"""The decode process of ``kvxfer bench handover``."""

from __future__ import annotations

import asyncio
import time

import numpy as np

import kvxfer
from kvxfer.bench.handover.prefill import HandoverEnd, tag
from kvxfer.bench.run.channel import Channel, Message
from kvxfer.bench.run.stats import MIB
from kvxfer.bench.work.page_data import Indices


class Decode(HandoverEnd):
    """Receives the pages of requests, says when it could begin, and checks every byte.

    Up to ``concurrency`` requests are in hand at once; each holds its blocks until it is checked.
    """

    def __init__(self, fields: Message, coordinator: Channel, peers: list[Channel]) -> None:
        super().__init__("decode", fields, coordinator, peers)
        self._checking = asyncio.Lock()
        #: request -> resolved by prefill's word that its pages can be read (pull).
        self._ready: dict[int, asyncio.Future[Message]] = {}

    async def run(self, requests: list[Message]) -> None:
        """Asks prefill for the requests as there is room; tells the coordinator of each that is checked."""
        start_ns = time.process_time_ns()
        slots = asyncio.Semaphore(self.options.concurrency)
        watcher = asyncio.create_task(self._watch()) if self.options.mode == "pull" else None
        async with asyncio.TaskGroup() as group:
            for asked in requests:
                await slots.acquire()
                task = group.create_task(self._serve(asked))
                task.add_done_callback(lambda _: slots.release())
        if watcher is not None:
            watcher.cancel()
        self._spent_ns += time.process_time_ns() - start_ns

    async def _serve(self, asked: Message) -> None:
        request, shape = asked["request"], self.options.shape()
        blocks = self.pages.allocate(request, asked["tokens"])
        seen: Message = {}
        move = self._push if self.options.mode == "push" else self._pull
        work = await move(asked, blocks, seen)
        # Decode could begin now; instead every byte is checked, and the blocks are given back.
        seen["decode_may_start_ns"] = time.monotonic_ns()
        if self.options.corrupt and request == self.options.requests - 1:
            self.pages.corrupt(blocks)
        async with self._checking:
            # In a thread: other requests' arrivals are not to be seen late.
            await asyncio.to_thread(self.pages.check, request, blocks)
        self.pages.cache.free(blocks)
        nbytes = len(blocks) * shape.block_nbytes
        self.coordinator.send(
            "request",
            request=request,
            nbytes=nbytes,
            rails=list(work.rails),
            words=f"{asked['tokens']} tokens, {nbytes / MIB:.0f} MiB, every byte checked",
            **seen,
        )

    async def _push(
        self, asked: Message, blocks: Indices, seen: Message
    ) -> kvxfer.Incoming | kvxfer.Transfer:
        incoming = self.agent.expect(
            tag(asked["request"]), blocks, region=self.pages.cache.region, timeout_s=self.options.timeout_s
        )
        self.other.send("request", **asked, blocks=blocks.tolist())
        seen["arrived_ns"] = await self._arrivals(incoming)
        # Its tag is the notification: it came when every byte was in place.
        seen["notification_ns"] = incoming.stages.ended_ns
        return incoming

    async def _pull(
        self, asked: Message, blocks: Indices, seen: Message
    ) -> kvxfer.Incoming | kvxfer.Transfer:
        request = asked["request"]
        ready = self._ready[request] = asyncio.get_running_loop().create_future()
        self.other.send("request", **asked)
        told = await ready
        del self._ready[request]
        seen["post_ns"] = time.monotonic_ns()
        transfer = self.agent.read(
            self.pages.cache.region,
            self.peer.regions["kv"],
            src_blocks=np.asarray(told["blocks"], dtype=np.uint32),
            dst_blocks=blocks,
            notify=tag(request),
            lease=kvxfer.LeaseToken.parse(told["lease"]),
            timeout_s=self.options.timeout_s,
        )
        seen["arrived_ns"] = await self._arrivals(transfer)
        return transfer

    async def _arrivals(self, work: kvxfer.Transfer | kvxfer.Incoming) -> list[int]:
        """Waits layer by layer, as a decode that starts early would; returns when each was in place."""
        arrived_ns = []
        for layer in range(self.options.shape().num_layers):
            await work.layer(layer)
            arrived_ns.append(time.monotonic_ns())
        await work
        # The last ones may have been in place before this loop came to look.
        return [min(at, work.stages.ended_ns) for at in arrived_ns]

    async def _watch(self) -> None:
        while True:
            message = await self.other.receive_async()
            self._ready[message["request"]].set_result(message)
