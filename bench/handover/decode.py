"""The decode process of ``kvxfer bench handover``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import numpy as np

import kvxfer
from kvxfer.bench.handover.prefill import HandoverEnd, tag
from kvxfer.bench.handover.prefix_cache import PrefixCache
from kvxfer.bench.handover.request_pages import GroupTable, Prefix
from kvxfer.bench.run.channel import Channel, Message
from kvxfer.bench.run.stats import MIB


class Decode(HandoverEnd):
    """Receives the pages of requests, says when it could begin, and checks every byte.

    Up to ``concurrency`` requests are in hand at once; each holds its blocks until it is checked.
    With prefix reuse the blocks of its prefix stay, and do not move for the next that begins alike.
    """

    def __init__(self, fields: Message, coordinator: Channel, peers: list[Channel]) -> None:
        super().__init__("decode", fields, coordinator, peers)
        self._kept = PrefixCache(self.options.reuse_blocks())
        self._checking = asyncio.Lock()
        #: request -> resolved by prefill's word that its pages can be read (pull).
        self._ready: dict[int, asyncio.Future[Message]] = {}

    async def run(self, requests: list[Message]) -> None:
        """Asks prefill for the requests as they arrive; tells the coordinator of each when it is checked.

        A request without ``arrival_ns`` (after the start) arrives when there is room for it.
        """
        start_ns = time.process_time_ns()
        begin_ns = time.monotonic_ns()
        slots = asyncio.Semaphore(self.options.concurrency)
        watched = self.peers if self.options.mode == "pull" else []
        watchers = [asyncio.create_task(self._watch(prefill)) for prefill in watched]
        async with asyncio.TaskGroup() as group:
            for asked in requests:
                arrival_ns = None
                if asked["arrival_ns"] is not None:
                    arrival_ns = begin_ns + asked["arrival_ns"]
                    await asyncio.sleep(max(0, arrival_ns - time.monotonic_ns()) / 1e9)
                await slots.acquire()
                task = group.create_task(self._serve(asked, arrival_ns or time.monotonic_ns()))
                task.add_done_callback(lambda _: slots.release())
        for watcher in watchers:
            watcher.cancel()
        self._spent_ns += time.process_time_ns() - start_ns

    async def _serve(self, asked: Message, arrival_ns: int) -> None:
        request = asked["request"]
        prefix = self.prefix_of(asked)
        taken = self._take(asked, prefix)
        tables = self.pages.allocate(request, asked["tokens"], prefix, skip=len(taken))
        seen: Message = {"arrival_ns": arrival_ns, "asked_ns": time.monotonic_ns()}
        move = self._push if self.options.mode == "push" else self._pull
        works = await move({**asked, "skip": len(taken)}, tables, seen)
        # Decode could begin now; instead every byte is checked, and the blocks are given back.
        seen["decode_may_start_ns"] = time.monotonic_ns()
        layers_nbytes = self.pages.layers_nbytes(tables)
        num_pages = self.pages.num_pages(tables)
        if taken:
            tables = [self._whole(asked, prefix, taken, tables[0])]
        if self.options.corrupt and request == self.options.requests - 1:
            self.pages.groups[-1].corrupt(tables[-1])
        async with self._checking:
            # In a thread: other requests' arrivals are not to be seen late.
            await asyncio.to_thread(self.pages.check, request, tables)
        self._give_back(tables, prefix, len(taken))
        nbytes = sum(layers_nbytes)
        reused_nbytes = len(taken) * self.shape.block_nbytes
        words = f"{asked['tokens']} tokens, {nbytes / MIB:.0f} MiB, every byte checked"
        if taken:
            words += f", {reused_nbytes / MIB:.0f} MiB were here"
        self.coordinator.send(
            "request",
            request=request,
            num_tokens=asked["tokens"],
            nbytes=nbytes,
            layers_nbytes=layers_nbytes,
            num_pages=num_pages,
            reused_nbytes=reused_nbytes,
            rails=sorted({rail for work in works for rail in work.rails}),
            words=words,
            **seen,
        )

    async def _push(
        self, asked: Message, tables: list[GroupTable], seen: Message
    ) -> list[kvxfer.Incoming] | list[kvxfer.Transfer]:
        incoming = [
            self.agent.expect(
                tag(asked["request"], group),
                table.blocks,
                region=pages.cache.region,
                timeout_s=self.options.timeout_s,
            )
            for group, pages, table in self.groups(tables)
        ]
        self.peers[asked["prefill"]].send(
            "request", **asked, blocks=[table.blocks.tolist() for table in tables]
        )
        seen["arrived_ns"] = await self._arrivals(incoming)
        # Its tag is the notification: it came when every byte was in place.
        seen["notification_ns"] = max(one.stages.ended_ns for one in incoming)
        return incoming

    async def _pull(
        self, asked: Message, tables: list[GroupTable], seen: Message
    ) -> list[kvxfer.Incoming] | list[kvxfer.Transfer]:
        ready = self._ready[asked["request"]] = asyncio.get_running_loop().create_future()
        self.peers[asked["prefill"]].send("request", **asked)
        told = await ready
        del self._ready[asked["request"]]
        remotes = self.peer_named(f"prefill-{asked['prefill']}").regions
        seen["post_ns"] = time.monotonic_ns()
        transfers = [
            self.agent.read(
                pages.cache.region,
                remotes[pages.group.name],
                src_blocks=np.asarray(told["blocks"][group], dtype=np.uint32),
                dst_blocks=table.blocks,
                notify=tag(asked["request"], group),
                lease=kvxfer.LeaseToken.parse(told["leases"][group]),
                timeout_s=self.options.timeout_s,
            )
            for group, pages, table in self.groups(tables)
        ]
        seen["arrived_ns"] = await self._arrivals(transfers)
        return transfers

    async def _arrivals(self, works: Sequence[kvxfer.Transfer | kvxfer.Incoming]) -> list[int]:
        """Waits layer by layer, as a decode that starts early would; returns when each was in place."""
        arrived_ns = []
        for group, number in self.shape.places:
            await works[group].layer(number)
            arrived_ns.append(time.monotonic_ns())
        for work in works:
            await work
        # The last ones may have been in place before this loop came to look.
        ended_ns = [works[group].stages.ended_ns for group, _ in self.shape.places]
        return [min(pair) for pair in zip(arrived_ns, ended_ns, strict=True)]

    def _take(self, asked: Message, prefix: Prefix) -> list[int]:
        """Returns the blocks that are here already; the last one always moves, with the first token."""
        if not self.options.prefix_reuse:
            return []
        shared = min(prefix.num_shared, self.shape.blocks_for(asked["tokens"]) - 1)
        return self._kept.take(prefix.contents(asked["request"], shared))

    def _whole(self, asked: Message, prefix: Prefix, taken: list[int], moved: GroupTable) -> GroupTable:
        """Returns the request's table with the blocks that did not move, for the check."""
        blocks = np.concatenate([np.asarray(taken, dtype=np.uint32), moved.blocks])
        return GroupTable(blocks, prefix.contents(asked["request"], len(blocks)))

    def _give_back(self, tables: list[GroupTable], prefix: Prefix, num_taken: int) -> None:
        if not self.options.prefix_reuse:
            self.pages.free(tables)
            return
        (table,) = tables
        shared = min(prefix.num_shared, len(table.blocks))
        freed = self._kept.give_back(table.contents[:shared], table.blocks[:shared], num_taken)
        gone = np.concatenate([np.asarray(freed, dtype=np.uint32), table.blocks[shared:]])
        if len(gone):
            self.pages.groups[0].cache.free(gone)

    async def _watch(self, prefill: Channel) -> None:
        while True:
            message = await prefill.receive_async()
            self._ready[message["request"]].set_result(message)
