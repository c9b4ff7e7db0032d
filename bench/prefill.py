"""The prefill process of ``kvxfer bench handover``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from kvxfer.bench.channel import Channel, Message
from kvxfer.bench.endpoint import Endpoint, limit_commands
from kvxfer.bench.handover import HandoverOptions
from kvxfer.bench.memory import rss_mib
from kvxfer.bench.process import serve
from kvxfer.bench.request_pages import RequestPages, open_endpoint
from kvxfer.bench.workload import Indices


class Prefill:
    """Computes requests layer by layer at a pace, and hands their pages to decode.

    Push: decode has named its blocks; each layer is released as soon as it is final. Pull: decode
    is told the blocks when the last layer is final, under a lease to read them.
    """

    def __init__(
        self, options: HandoverOptions, endpoint: Endpoint, coordinator: Channel, decode: Channel
    ) -> None:
        self._options = options
        self._shape = options.shape()
        self._endpoint = endpoint
        self._coordinator = coordinator
        self._decode = decode
        self._pages = RequestPages(self._shape, endpoint)
        self._cpu_ns = 0
        #: request -> resolved with the time at which decode's notification came (pull).
        self._read: dict[int, asyncio.Future[int]] = {}

    def handlers(self) -> dict[str, Any]:
        return {"run": self.run, "usage": self.usage}

    def usage(self) -> Message:
        """Processor time of all runs without filling pages, and resident memory."""
        return {"cpu_ns": self._cpu_ns - self._pages.cpu_ns, "rss_mib": rss_mib()}

    async def run(self, requests: list[Message]) -> Message:
        """Serves the requests as decode asks for them; tells the coordinator of each at its end."""
        start_ns = time.process_time_ns()
        watcher = asyncio.create_task(self._watch()) if self._options.mode == "pull" else None
        serve_one = self._push if self._options.mode == "push" else self._pull
        async with asyncio.TaskGroup() as group:
            for _ in requests:
                group.create_task(serve_one(await self._decode.receive_async()))
        if watcher is not None:
            watcher.cancel()
        self._cpu_ns += time.process_time_ns() - start_ns
        return {}

    async def _push(self, asked: Message) -> None:
        request, blocks = asked["request"], self._allocate(asked)
        post_ns = time.monotonic_ns()
        transfer = self._endpoint.agent.write(
            self._endpoint.region,
            self._endpoint.remote,
            src_blocks=blocks,
            dst_blocks=np.asarray(asked["blocks"], dtype=np.uint32),
            notify=tag(request),
            hold=True,
            timeout_s=self._options.timeout_s,
        )
        released_ns = []
        async for layer in self._layers(request, blocks):
            released_ns.append(time.monotonic_ns())
            transfer.release(layer + 1)
        await transfer
        self._endpoint.free(blocks)
        self._coordinator.send(
            "request", request=request, post_ns=post_ns, released_ns=released_ns, end_ns=released_ns[-1]
        )

    async def _pull(self, asked: Message) -> None:
        request, blocks = asked["request"], self._allocate(asked)
        async for _ in self._layers(request, blocks):
            pass
        end_ns = time.monotonic_ns()
        self._read[request] = asyncio.get_running_loop().create_future()
        lease = self._endpoint.region.grant(
            self._endpoint.peer, blocks=blocks, mode="read", ttl_s=self._options.timeout_s
        )
        self._decode.send("ready", request=request, blocks=blocks.tolist())
        # Decode's notification: it has every page. Revoking fences, and the blocks can be used again.
        notification_ns = await asyncio.wait_for(self._read[request], self._options.timeout_s)
        del self._read[request]
        lease.revoke()
        self._endpoint.free(blocks)
        self._coordinator.send("request", request=request, end_ns=end_ns, notification_ns=notification_ns)

    async def _layers(self, request: int, blocks: Indices) -> AsyncIterator[int]:
        """Computes the layers in order, each when it is due; yields the one that is final now."""
        due_s = time.monotonic()
        for layer in range(self._shape.num_layers):
            due_s += self._options.prefill_ms_per_layer / 1e3
            self._pages.fill_layer(request, layer, blocks)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            yield layer

    async def _watch(self) -> None:
        async for note in self._endpoint.agent.notifications():
            future = self._read.get(request_of(note.payload))
            if future is not None and not future.done():
                future.set_result(time.monotonic_ns())

    def _allocate(self, asked: Message) -> Indices:
        return self._endpoint.allocate(self._shape.blocks_for(asked["tokens"]), f"request {asked['request']}")


def tag(request: int) -> bytes:
    """Returns the notification that goes with a request's pages."""
    return b"request-%d" % request


def request_of(payload: bytes) -> int:
    """Returns the request of a `tag`."""
    return int(payload.removeprefix(b"request-"))


async def run(fields: Message, coordinator: Channel, peer: Channel | None) -> None:
    """Serves as prefill until the coordinator ends."""
    assert peer is not None
    options = HandoverOptions(**fields)
    shape, num_blocks = options.shape(), options.num_blocks()
    async with open_endpoint("prefill-0", options.transport, shape, num_blocks, options.seed) as endpoint:
        prefill = Prefill(options, endpoint, coordinator, peer)
        await serve(coordinator, {**endpoint.handlers(), **prefill.handlers(), **limit_commands(coordinator)})
