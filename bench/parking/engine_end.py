"""An engine in a process of its own. Its pages are parked, and it fetches them."""

from __future__ import annotations

import time
import zlib
from typing import Any

import numpy as np

import kvxfer
from kvxfer.bench.run.channel import Channel, Message
from kvxfer.bench.run.endpoint import LEASE_S, Space
from kvxfer.bench.run.process import End

_TIMEOUT_S = 60.0


class EngineEnd(End):
    """An agent with a cache. One half is parked; pages are fetched into the other half."""

    def __init__(self, fields: Message, coordinator: Channel, peers: Any = ()) -> None:
        super().__init__(fields, coordinator, peers)
        axes, shape = fields["axes"], tuple(fields["shape"])
        options = kvxfer.AgentOptions(
            transports=(fields["transport"],), copy_threads=fields["copy_threads"], silent_timeout_s=30.0
        )
        self._agent = kvxfer.Agent("engine", options)
        num_blocks = shape[axes.index("b")]
        space = Space(fields["memory"], int(np.prod(shape)) * 2, num_blocks)
        self._array = space.array.view(np.uint16).reshape(shape)
        rows = self._array.reshape(-1).view(np.uint64)
        with np.errstate(over="ignore"):
            rows[:] = np.arange(1, len(rows) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self._by_block = np.moveaxis(self._array, axes.index("b"), 0)
        layout = kvxfer.KVLayout.from_tensor(self._array, axes, dtype="bfloat16")
        self._region = self._agent.register("kv", self._array, layout)

    def place(self) -> Message:
        """Returns its address. Grants its whole cache to every peer that has the token."""
        lease = self._region.grant(None, ttl_s=LEASE_S)
        return {"address": self._agent.address, "token": str(lease.token)}

    def fetch(self, parts: list[list[Any]]) -> Message:
        """Reads leased pages into blocks. Each part names the region, the token and both blocks."""
        started = time.perf_counter_ns()
        reads = []
        for encoded, token, blocks, into in parts:
            region = kvxfer.RegionDescriptor.from_bytes(encoded.encode())
            self._agent.connect_blocking(region, _TIMEOUT_S)
            lease = kvxfer.LeaseToken.parse(token)
            reads.append(self._agent.read(self._region, region, blocks, into, lease=lease))
        for read in reads:
            read.wait(_TIMEOUT_S)
        return {"elapsed_ns": time.perf_counter_ns() - started}

    def sums(self, blocks: list[int]) -> Message:
        """Returns a checksum of each block."""
        return {"sums": [zlib.crc32(np.ascontiguousarray(self._by_block[block]).data) for block in blocks]}

    def clear(self, blocks: list[int]) -> None:
        """Zeroes blocks, so that no check passes because of earlier bytes."""
        for block in blocks:
            self._by_block[block] = 0

    async def aclose(self) -> None:
        self._agent.close()
