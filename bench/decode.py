"""The decode process of ``kvxfer bench handover``."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

import kvxfer
from kvxfer.bench.channel import Channel, Message
from kvxfer.bench.endpoint import Endpoint, limit_commands
from kvxfer.bench.handover import HandoverOptions
from kvxfer.bench.memory import rss_mib
from kvxfer.bench.prefill import tag
from kvxfer.bench.process import serve
from kvxfer.bench.request_pages import RequestPages, open_endpoint
from kvxfer.bench.workload import Indices


class Decode:
    """Receives the pages of requests, says when it could begin, and checks every byte.

    Up to ``concurrency`` requests are in hand at once; each holds its blocks until it is checked.
    """

    def __init__(
        self, options: HandoverOptions, endpoint: Endpoint, coordinator: Channel, prefill: Channel
    ) -> None:
        self._options = options
        self._shape = options.shape()
        self._endpoint = endpoint
        self._coordinator = coordinator
        self._prefill = prefill
        self._pages = RequestPages(self._shape, endpoint)
        self._checking = asyncio.Lock()
        self._cpu_ns = 0
        #: request -> resolved by prefill's word that its pages can be read (pull).
        self._ready: dict[int, asyncio.Future[Message]] = {}

    def handlers(self) -> dict[str, Any]:
        return {"run": self.run, "usage": self.usage}

    def usage(self) -> Message:
        """Processor time of all runs without checking pages, and resident memory."""
        return {"cpu_ns": self._cpu_ns - self._pages.cpu_ns, "rss_mib": rss_mib()}

    async def run(self, requests: list[Message]) -> Message:
        """Asks prefill for the requests; tells the coordinator of each when it is checked."""
        start_ns = time.process_time_ns()
        slots = asyncio.Semaphore(self._options.concurrency)
        serve_one = self._push if self._options.mode == "push" else self._pull
        watcher = asyncio.create_task(self._watch()) if self._options.mode == "pull" else None
        async with asyncio.TaskGroup() as group:
            for asked in requests:
                await slots.acquire()
                task = group.create_task(serve_one(asked["request"], asked["tokens"]))
                task.add_done_callback(lambda _: slots.release())
        if watcher is not None:
            watcher.cancel()
        self._cpu_ns += time.process_time_ns() - start_ns
        return {}

    async def _push(self, request: int, num_tokens: int) -> None:
        blocks = self._endpoint.allocate(self._shape.blocks_for(num_tokens), f"request {request}")
        incoming = self._endpoint.agent.expect(
            tag(request), blocks, region=self._endpoint.region, timeout_s=self._options.timeout_s
        )
        self._prefill.send("request", request=request, tokens=num_tokens, blocks=blocks.tolist())
        arrived_ns = await self._arrivals(incoming)
        # Its tag is the notification: it came when every byte was in place.
        notification_ns = incoming.stages.ended_ns
        await self._finish(
            request, num_tokens, blocks, incoming, arrived_ns=arrived_ns, notification_ns=notification_ns
        )

    async def _pull(self, request: int, num_tokens: int) -> None:
        ready = self._ready[request] = asyncio.get_running_loop().create_future()
        self._prefill.send("request", request=request, tokens=num_tokens)
        src_blocks = (await ready)["blocks"]
        del self._ready[request]
        blocks = self._endpoint.allocate(self._shape.blocks_for(num_tokens), f"request {request}")
        post_ns = time.monotonic_ns()
        transfer = self._endpoint.agent.read(
            self._endpoint.region,
            self._endpoint.remote,
            src_blocks=np.asarray(src_blocks, dtype=np.uint32),
            dst_blocks=blocks,
            notify=tag(request),
            timeout_s=self._options.timeout_s,
        )
        arrived_ns = await self._arrivals(transfer)
        await self._finish(request, num_tokens, blocks, transfer, arrived_ns=arrived_ns, post_ns=post_ns)

    async def _arrivals(self, work: kvxfer.Transfer | kvxfer.Incoming) -> list[int]:
        """Waits layer by layer, as a decode that starts early would; returns when each was in place."""
        arrived_ns = []
        for layer in range(self._shape.num_layers):
            await work.layer(layer)
            arrived_ns.append(time.monotonic_ns())
        await work
        # The last ones may have been in place before this loop came to look.
        return [min(ns, work.stages.ended_ns) for ns in arrived_ns]

    async def _finish(
        self,
        request: int,
        num_tokens: int,
        blocks: Indices,
        work: kvxfer.Transfer | kvxfer.Incoming,
        **seen: Any,
    ) -> None:
        """Decode could begin now; instead every byte is checked, and the blocks are given back."""
        decode_may_start_ns = time.monotonic_ns()
        if self._options.corrupt and request == self._options.requests - 1:
            self._pages.corrupt(blocks)
        async with self._checking:
            # In a thread: other requests' arrivals are not to be seen late.
            await asyncio.to_thread(self._pages.check, request, blocks)
        self._endpoint.free(blocks)
        nbytes = len(blocks) * self._shape.block_nbytes
        self._coordinator.send(
            "request",
            request=request,
            nbytes=nbytes,
            decode_may_start_ns=decode_may_start_ns,
            rails=list(work.rails),
            words=f"{num_tokens} tokens, {nbytes / (1 << 20):.0f} MiB, every byte checked",
            **seen,
        )

    async def _watch(self) -> None:
        while True:
            message = await self._prefill.receive_async()
            self._ready[message["request"]].set_result(message)


async def run(fields: Message, coordinator: Channel, peer: Channel | None) -> None:
    """Serves as decode until the coordinator ends."""
    assert peer is not None
    options = HandoverOptions(**fields)
    shape, num_blocks = options.shape(), options.num_blocks()
    async with open_endpoint("decode-0", options.transport, shape, num_blocks, options.seed + 1) as endpoint:
        decode = Decode(options, endpoint, coordinator, peer)
        await serve(coordinator, {**endpoint.handlers(), **decode.handlers(), **limit_commands(coordinator)})
