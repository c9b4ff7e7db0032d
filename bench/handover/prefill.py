"""The prefill process of ``kvxfer bench handover``, and what it has in common with decode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import numpy as np

import kvxfer
from kvxfer.bench.handover.measure import HandoverOptions
from kvxfer.bench.handover.request_pages import GroupPages, GroupTable, Prefix, RequestPages, open_caches
from kvxfer.bench.run.channel import Channel, Message
from kvxfer.bench.run.endpoint import AgentEnd


class HandoverEnd(AgentEnd):
    """What both kinds of processes share: an agent, a cache for each group of layers, the requests' pages."""

    def __init__(self, role: str, fields: Message, coordinator: Channel, peers: list[Channel]) -> None:
        index = fields.pop("index")
        self.options = options = HandoverOptions(**fields)
        self.shape = options.shape()
        names = tuple(group.name for group in self.shape.groups)
        super().__init__(f"{role}-{index}", options.transport, coordinator, peers, names)
        num_blocks = options.num_blocks()
        if role == "prefill":
            # Every decode process may have all its requests in hand here.
            num_blocks = [options.decodes * count for count in num_blocks]
        else:
            num_blocks[0] += options.reuse_blocks()
        # Seeds of its own, so that no two processes name blocks in the same order.
        seed = options.seed + 2 * index + (role == "decode")
        caches = open_caches(self.agent, self.shape, num_blocks, seed)
        self.page_kind = caches[0].page_kind
        self.pages = RequestPages(self.shape, caches)
        self._spent_ns = 0

    def usage(self) -> Message:
        """Processor time of all runs without filling and checking pages."""
        return {"cpu_ns": self._spent_ns - self.pages.cpu_ns}

    def peer_named(self, name: str) -> kvxfer.Peer:
        """Returns the connected peer of this name."""
        return next(peer for peer in self.agent.peers if peer.name == name)

    def prefix_of(self, asked: Message) -> Prefix:
        """Returns what a request has in common with others."""
        return Prefix(tuple(asked["prefix_ids"]), asked["chunk_blocks"])

    def groups(self, tables: list[GroupTable]) -> Iterator[tuple[int, GroupPages, GroupTable]]:
        """Yields the number, the pages and the request's table of each group of layers."""
        for group, (pages, table) in enumerate(zip(self.pages.groups, tables, strict=True)):
            yield group, pages, table


class Prefill(HandoverEnd):
    """Computes requests layer by layer at a pace, and hands their pages to decode.

    Push: decode has named its blocks; each layer is released as soon as it is final. Pull: decode
    is told the blocks when the last layer is final, under a lease to read them.
    """

    def __init__(self, fields: Message, coordinator: Channel, peers: list[Channel]) -> None:
        super().__init__("prefill", fields, coordinator, peers)
        # So many requests fit the pools.
        self._room = asyncio.Semaphore(self.options.concurrency * self.options.decodes)
        #: request and group -> resolved with the time at which decode's notification came (pull).
        self._read: dict[bytes, asyncio.Future[int]] = {}

    async def run(self, requests: list[Message]) -> None:
        """Serves the requests as decode asks for them; tells the coordinator of each at its end."""
        start_ns = time.process_time_ns()
        watcher = asyncio.create_task(self._watch()) if self.options.mode == "pull" else None
        async with asyncio.TaskGroup() as group:
            for decode in range(len(self.peers)):
                count = sum(asked["decode"] == decode for asked in requests)
                group.create_task(self._serve(group, decode, count))
        if watcher is not None:
            watcher.cancel()
        self._spent_ns += time.process_time_ns() - start_ns

    async def _serve(self, group: asyncio.TaskGroup, decode: int, count: int) -> None:
        """Takes on the requests of one decode process as it asks for them, and as blocks become free.

        Decode may go on before this end has heard that its last request is there.
        """
        serve_one = self._push if self.options.mode == "push" else self._pull
        for _ in range(count):
            asked = await self.peers[decode].receive_async()
            await self._room.acquire()
            task = group.create_task(serve_one(asked))
            task.add_done_callback(lambda _: self._room.release())

    async def _push(self, asked: Message) -> None:
        request, tables = asked["request"], self._allocate(asked)
        remotes = self.peer_named(f"decode-{asked['decode']}").regions
        post_ns = time.monotonic_ns()
        transfers = [
            self.agent.write(
                pages.cache.region,
                remotes[pages.group.name],
                src_blocks=table.blocks,
                dst_blocks=np.asarray(asked["blocks"][group], dtype=np.uint32),
                notify=tag(request, group),
                hold=True,
                timeout_s=self.options.timeout_s,
            )
            for group, pages, table in self.groups(tables)
        ]
        released_ns = []
        async for layer in self._layers(tables):
            released_ns.append(time.monotonic_ns())
            group, number = self.shape.places[layer]
            transfers[group].release(number + 1)
        for transfer in transfers:
            await transfer
        self.pages.free(tables)
        self.coordinator.send(
            "request",
            request=request,
            post_ns=post_ns,
            released_ns=released_ns,
            prefill_end_ns=released_ns[-1],
        )

    async def _pull(self, asked: Message) -> None:
        request, tables = asked["request"], self._allocate(asked)
        async for _ in self._layers(tables):
            pass
        end_ns = time.monotonic_ns()
        loop = asyncio.get_running_loop()
        reads = {tag(request, group): loop.create_future() for group in range(len(tables))}
        self._read.update(reads)
        decode = self.peer_named(f"decode-{asked['decode']}")
        leases = [
            pages.cache.region.grant(decode, blocks=table.blocks, mode="read", ttl_s=self.options.timeout_s)
            for _, pages, table in self.groups(tables)
        ]
        # The word may overtake the grant, and these blocks were another request's a moment ago: tokens say
        # which leases are meant.
        self.peers[asked["decode"]].send(
            "ready",
            request=request,
            blocks=[table.blocks.tolist() for table in tables],
            leases=[str(lease.token) for lease in leases],
        )
        # Decode's notifications: it has every page. Revoking fences, and the blocks can be used again.
        async with asyncio.timeout(self.options.timeout_s):
            notification_ns = max(await asyncio.gather(*reads.values()))
        for payload in reads:
            del self._read[payload]
        for lease in leases:
            await lease.revoke()
        self.pages.free(tables)
        self.coordinator.send(
            "request", request=request, prefill_end_ns=end_ns, notification_ns=notification_ns
        )

    async def _layers(self, tables: list[GroupTable]) -> AsyncIterator[int]:
        """Computes the layers in order, each when it is due; yields the one that is final now."""
        due_s = time.monotonic()
        for layer in range(self.shape.num_layers):
            due_s += self.options.prefill_ms_per_layer / 1e3
            self.pages.fill_layer(layer, tables)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            yield layer

    async def _watch(self) -> None:
        async for note in self.agent.notifications():
            future = self._read.get(note.payload)
            if future is not None and not future.done():
                future.set_result(time.monotonic_ns())

    def _allocate(self, asked: Message) -> list[GroupTable]:
        prefix = self.prefix_of(asked)
        return self.pages.allocate(asked["request"], asked["tokens"], prefix, skip=asked["skip"])


def tag(request: int, group: int) -> bytes:
    """Returns the notification that goes with a request's pages in one group of layers."""
    return b"request-%d-%d" % (request, group)
