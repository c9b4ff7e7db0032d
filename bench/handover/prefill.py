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
from kvxfer.bench.run.perftest import device_of
from kvxfer.bench.work.page_data import Indices


class HandoverEnd(AgentEnd):
    """What both processes share: an agent, a cache, the requests' pages, and a channel to the other end."""

    role = ""

    def __init__(self, fields: Message, coordinator: Channel, peers: list[Channel]) -> None:
        self.options = options = HandoverOptions(**fields)
        self.shape = options.shape()
        device = device_of(options.transport, options.device)
        super().__init__(self.role, options.transport, coordinator, peers, device=device)
        # Seeds of its own, so that the two processes do not name blocks in the same order.
        seed = options.seed + (self.role == "decode")
        num_blocks = self.shape.blocks_for(options.max_tokens)
        self.pages = RequestPages(self.agent, self.shape, num_blocks, seed)
        self.page_kind = self.pages.cache.page_kind
        (self.other,) = peers
        self._spent_ns = 0

    async def run(self, requests: list[Message]) -> None:
        """Hands requests over, one after the other; tells the coordinator of each."""
        start_ns = time.process_time_ns()
        for asked in requests:
            blocks = self.pages.allocate(asked["request"], asked["tokens"])
            seen = await self.serve(asked, blocks)
            self.pages.cache.free(blocks)
            self.coordinator.send("request", request=asked["request"], **seen)
        self._spent_ns += time.process_time_ns() - start_ns

    async def serve(self, asked: Message, blocks: Indices) -> Message:
        """Does this end's part of a request; returns what it saw."""
        raise NotImplementedError

    def usage(self) -> Message:
        """Processor time of all runs without filling and checking pages."""
        return {"cpu_ns": self._spent_ns - self.pages.cpu_ns}


class Prefill(HandoverEnd):
    """Computes requests layer by layer at a pace, and pushes them to decode, which has named its blocks.

    Each layer is released as soon as it is final.
    """

    role = "prefill"

    async def serve(self, asked: Message, blocks: Indices) -> Message:
        told = await self.other.receive_async()
        post_ns = time.monotonic_ns()
        transfer = self.agent.write(
            self.pages.cache.region,
            self.peer.regions["kv"],
            src_blocks=blocks,
            dst_blocks=np.asarray(told["blocks"], dtype=np.uint32),
            notify=tag(asked["request"]),
            hold=True,
            timeout_s=self.options.timeout_s,
        )
        released_ns = []
        async for layer in self._layers(asked["request"], blocks):
            released_ns.append(time.monotonic_ns())
            transfer.mark_ready(layer + 1)
        await transfer
        return {"post_ns": post_ns, "released_ns": released_ns, "prefill_end_ns": released_ns[-1]}

    async def _layers(self, request: int, blocks: Indices) -> AsyncIterator[int]:
        """Computes the layers in order, each when it is due; yields the one that is final now."""
        due_s = time.monotonic()
        for layer in range(self.shape.num_layers):
            due_s += self.options.prefill_ms_per_layer / 1e3
            self.pages.fill_layer(request, layer, blocks)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            yield layer


def tag(request: int) -> bytes:
    """Returns the notification that goes with a request's pages."""
    return b"request-%d" % request
