"""The two worker processes of ``kvxfer bench pages``: source and destination."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import kvxfer
from kvxfer.bench.pages.measure import PagesOptions
from kvxfer.bench.run.channel import Channel, Message
from kvxfer.bench.run.endpoint import Endpoint, limit_commands
from kvxfer.bench.run.process import serve
from kvxfer.bench.work.page_data import Indices, PageFiller, Words, block_order, page_keys

# Longer than any run: the lease of reads is not what is measured.
_LEASE_S = 3600.0


class PagesEnd:
    """What both ends share: the cache, the order of its blocks, and the data of an iteration."""

    def __init__(self, options: PagesOptions, endpoint: Endpoint, coordinator: Channel, seed: int) -> None:
        self.options = options
        self.endpoint = endpoint
        self.coordinator = coordinator
        #: Blocks in the order in which they are named.
        self.blocks = block_order(options.pattern, options.num_blocks, seed)
        self.pages: Words = endpoint.pages(options.page_nbytes)
        self.filler = PageFiller(options.page_nbytes)
        # [layer, block]: the same blocks in every layer, layers one after the other in memory.
        layer_rows = np.arange(options.layers, dtype=np.uint32)[:, None] * np.uint32(options.num_blocks)
        self.rows: Indices = (layer_rows + self.blocks[None, :]).reshape(-1)
        self._cpu_ns = 0

    def keys(self, iteration: int) -> Words:
        return page_keys(iteration, num_pages=self.options.num_pages)

    def start_cpu(self) -> None:
        self._cpu_ns = time.process_time_ns()

    def cpu_ns(self) -> int:
        """Processor time of all threads since ``start_cpu``."""
        return time.process_time_ns() - self._cpu_ns

    def wait(self, transfer: kvxfer.Transfer, start_ns: int, post_ns: int) -> Message:
        """Waits for a transfer that this end posted."""
        transfer.wait(self.options.timeout_s)
        total_ns = time.monotonic_ns() - start_ns
        return {
            "total_ns": total_ns,
            "post_ns": post_ns,
            "cpu_ns": self.cpu_ns(),
            "rails": list(transfer.rails),
        }


class Source(PagesEnd):
    """Fills the pages; writes them, or lets them be read."""

    _lease: kvxfer.Lease | None = None

    def handlers(self) -> dict[str, Any]:
        return {
            "fill": self.fill,
            "write": self.write,
            "serve_begin": self.serve_begin,
            "serve_end": self.serve_end,
        }

    def fill(self, iteration: int) -> Message:
        self.filler.fill(self.pages, self.rows, self.keys(iteration))
        return {}

    def write(self, iteration: int) -> Message:
        dst_blocks = block_order(self.options.pattern, self.options.num_blocks, self.options.seed + 1)
        self.start_cpu()
        start_ns = time.monotonic_ns()
        transfer = self.endpoint.agent.write(
            self.endpoint.region,
            self.endpoint.remote,
            src_blocks=self.blocks,
            dst_blocks=dst_blocks,
            notify=_tag(iteration),
            timeout_s=self.options.timeout_s,
        )
        return self.wait(transfer, start_ns, time.monotonic_ns() - start_ns)

    def serve_begin(self) -> Message:
        """From here the progress thread serves a read; this one waits for the coordinator."""
        if self._lease is None:
            self._lease = self.endpoint.region.grant(self.endpoint.peer, mode="read", ttl_s=_LEASE_S)
        self.start_cpu()
        return {}

    def serve_end(self) -> Message:
        return {"cpu_ns": self.cpu_ns()}


class Destination(PagesEnd):
    """Expects the pages, or reads them; checks every byte."""

    def handlers(self) -> dict[str, Any]:
        return {"clear": self.clear, "expect": self.expect, "read": self.read, "check": self.check}

    def clear(self) -> Message:
        self.pages[:] = 0
        return {}

    def expect(self, iteration: int) -> Message:
        self.start_cpu()
        incoming = self.endpoint.agent.expect(
            _tag(iteration), self.blocks, self.endpoint.region, timeout_s=self.options.timeout_s
        )
        self.coordinator.send("reply")
        incoming.wait(self.options.timeout_s)
        return {"cpu_ns": self.cpu_ns(), "rails": list(incoming.rails)}

    def read(self, iteration: int) -> Message:
        src_blocks = block_order(self.options.pattern, self.options.num_blocks, self.options.seed)
        self.start_cpu()
        start_ns = time.monotonic_ns()
        transfer = self.endpoint.agent.read(
            self.endpoint.region,
            self.endpoint.remote,
            src_blocks=src_blocks,
            dst_blocks=self.blocks,
            timeout_s=self.options.timeout_s,
        )
        return self.wait(transfer, start_ns, time.monotonic_ns() - start_ns)

    def check(self, iteration: int, corrupt: bool) -> Message:
        """Compares every byte; ``corrupt`` flips one before."""
        if corrupt:
            self.pages[self.rows[-1]].view(np.uint8)[-1] ^= 1
        wrong = self.filler.check(self.pages, self.rows, self.keys(iteration))
        return {"wrong": "" if wrong is None else str(wrong)}


def _tag(iteration: int) -> bytes:
    return b"pages-%d" % iteration


def _endpoint(name: str, options: PagesOptions) -> Endpoint:
    return Endpoint(
        name,
        options.transport,
        options.memory,
        axes="lbd",
        shape=(options.layers, options.num_blocks, options.page_nbytes),
        dtype="uint8",
        num_blocks=options.num_blocks,
    )


async def run_source(fields: Message, coordinator: Channel, peer: Channel | None) -> None:
    """Serves as the source until the coordinator ends."""
    options = PagesOptions(**fields)
    async with _endpoint("source", options) as endpoint:
        source = Source(options, endpoint, coordinator, options.seed)
        await serve(coordinator, {**endpoint.handlers(), **source.handlers(), **limit_commands(coordinator)})


async def run_destination(fields: Message, coordinator: Channel, peer: Channel | None) -> None:
    """Serves as the destination until the coordinator ends."""
    options = PagesOptions(**fields)
    async with _endpoint("destination", options) as endpoint:
        destination = Destination(options, endpoint, coordinator, options.seed + 1)
        handlers = {**endpoint.handlers(), **destination.handlers(), **limit_commands(coordinator)}
        await serve(coordinator, handlers)
