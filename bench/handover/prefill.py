"""The prefill process of ``kvxfer bench handover``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

import kvxfer
from kvxfer.bench.handover.cache import Cache
from kvxfer.bench.handover.measure import HandoverOptions
from kvxfer.bench.handover.request_pages import GroupTable, Prefix, RequestPages, open_caches
from kvxfer.bench.run.channel import Channel, Message
from kvxfer.bench.run.endpoint import Endpoint, limit_commands
from kvxfer.bench.run.memory import rss_mib
from kvxfer.bench.run.process import serve


class Prefill:
    """Computes requests layer by layer at a pace, and hands their pages to decode.

    Push: decode has named its blocks; each layer is released as soon as it is final. Pull: decode
    is told the blocks when the last layer is final, under a lease to read them.
    """

    def __init__(
        self,
        options: HandoverOptions,
        caches: list[Endpoint | Cache],
        endpoint: Endpoint,
        coordinator: Channel,
        decodes: list[Channel],
    ) -> None:
        self._options = options
        self._shape = options.shape()
        self._endpoint = endpoint
        self._coordinator = coordinator
        self._decodes = decodes
        self._pages = RequestPages(self._shape, caches)
        self._cpu_ns = 0
        #: request and group -> resolved with the time at which decode's notification came (pull).
        self._read: dict[bytes, asyncio.Future[int]] = {}

    def handlers(self) -> dict[str, Any]:
        return {"run": self.run, "usage": self.usage}

    def usage(self) -> Message:
        """Processor time of all runs without filling pages, and resident memory."""
        return {"cpu_ns": self._cpu_ns - self._pages.cpu_ns, "rss_mib": rss_mib()}

    async def run(self, requests: list[Message]) -> Message:
        """Serves the requests as decode asks for them; tells the coordinator of each at its end."""
        start_ns = time.process_time_ns()
        watcher = asyncio.create_task(self._watch()) if self._options.mode == "pull" else None
        async with asyncio.TaskGroup() as group:
            for decode in range(len(self._decodes)):
                count = sum(asked["decode"] == decode for asked in requests)
                group.create_task(self._serve(group, decode, count))
        if watcher is not None:
            watcher.cancel()
        self._cpu_ns += time.process_time_ns() - start_ns
        return {}

    async def _serve(self, group: asyncio.TaskGroup, decode: int, count: int) -> None:
        """Takes on the requests of one decode process as it asks for them."""
        serve_one = self._push if self._options.mode == "push" else self._pull
        for _ in range(count):
            group.create_task(serve_one(await self._decodes[decode].receive_async()))

    async def _push(self, asked: Message) -> None:
        request, tables = asked["request"], self._allocate(asked)
        remotes = peer_named(self._endpoint.agent, f"decode-{asked['decode']}").regions
        post_ns = time.monotonic_ns()
        transfers = [
            self._endpoint.agent.write(
                pages.cache.region,
                remotes[pages.group.name],
                src_blocks=table.blocks,
                dst_blocks=np.asarray(asked["blocks"][group], dtype=np.uint32),
                notify=tag(request, group),
                hold=True,
                timeout_s=self._options.timeout_s,
            )
            for group, (pages, table) in enumerate(zip(self._pages.groups, tables, strict=True))
        ]
        released_ns = []
        async for layer in self._layers(tables):
            released_ns.append(time.monotonic_ns())
            group, number = self._shape.places[layer]
            transfers[group].release(number + 1)
        for transfer in transfers:
            await transfer
        self._pages.free(tables)
        self._coordinator.send(
            "request", request=request, post_ns=post_ns, released_ns=released_ns, end_ns=released_ns[-1]
        )

    async def _pull(self, asked: Message) -> None:
        request, tables = asked["request"], self._allocate(asked)
        async for _ in self._layers(tables):
            pass
        end_ns = time.monotonic_ns()
        loop = asyncio.get_running_loop()
        reads = {tag(request, group): loop.create_future() for group in range(len(tables))}
        self._read.update(reads)
        decode = peer_named(self._endpoint.agent, f"decode-{asked['decode']}")
        leases = [
            pages.cache.region.grant(decode, blocks=table.blocks, mode="read", ttl_s=self._options.timeout_s)
            for pages, table in zip(self._pages.groups, tables, strict=True)
        ]
        # The word may overtake the grant, and these blocks were another request's a moment ago: tokens say
        # which leases are meant.
        self._decodes[asked["decode"]].send(
            "ready",
            request=request,
            blocks=[table.blocks.tolist() for table in tables],
            leases=[str(lease.token) for lease in leases],
        )
        # Decode's notifications: it has every page. Revoking fences, and the blocks can be used again.
        async with asyncio.timeout(self._options.timeout_s):
            notification_ns = max(await asyncio.gather(*reads.values()))
        for payload in reads:
            del self._read[payload]
        for lease in leases:
            lease.revoke_blocking()
        self._pages.free(tables)
        self._coordinator.send("request", request=request, end_ns=end_ns, notification_ns=notification_ns)

    async def _layers(self, tables: list[GroupTable]) -> AsyncIterator[int]:
        """Computes the layers in order, each when it is due; yields the one that is final now."""
        due_s = time.monotonic()
        for layer in range(self._shape.num_layers):
            due_s += self._options.prefill_ms_per_layer / 1e3
            self._pages.fill_layer(layer, tables)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            yield layer

    async def _watch(self) -> None:
        async for note in self._endpoint.agent.notifications():
            future = self._read.get(note.payload)
            if future is not None and not future.done():
                future.set_result(time.monotonic_ns())

    def _allocate(self, asked: Message) -> list[GroupTable]:
        prefix = Prefix(tuple(asked["prefix_ids"]), self._options.chunk_blocks(asked["scale"]))
        return self._pages.allocate(asked["request"], asked["tokens"], prefix, skip=asked["skip"])


def tag(request: int, group: int) -> bytes:
    """Returns the notification that goes with a request's pages in one group of layers."""
    return b"request-%d-%d" % (request, group)


def peer_named(agent: kvxfer.Agent, name: str) -> kvxfer.Peer:
    """Returns the connected peer of this name."""
    return next(peer for peer in agent.peers if peer.name == name)


async def run(fields: Message, coordinator: Channel, peers: list[Channel]) -> None:
    """Serves as one of the prefill processes until the coordinator ends; ``index`` says which."""
    index = fields.pop("index")
    options = HandoverOptions(**fields)
    # Every decode process may have all its requests in hand here.
    num_blocks = [options.decodes * blocks for blocks in options.num_blocks()]
    # Seeds of its own, so that no two processes name blocks in the same order.
    seed = options.seed + 2 * index
    caches = open_caches(f"prefill-{index}", options.transport, options.shape(), num_blocks, seed)
    endpoint = caches[0]
    assert isinstance(endpoint, Endpoint)
    async with endpoint:
        prefill = Prefill(options, caches, endpoint, coordinator, peers)
        await serve(coordinator, {**endpoint.handlers(), **prefill.handlers(), **limit_commands(coordinator)})
