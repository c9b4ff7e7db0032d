"""The two worker processes of ``kvxfer bench scale``: a hub, and a crowd of agents around it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import kvxfer
from kvxfer.bench.run.channel import Channel, Message
from kvxfer.bench.run.endpoint import LEASE_S
from kvxfer.bench.run.process import End
from kvxfer.bench.scale.measure import PAGE_NBYTES
from kvxfer.bench.work.page_data import PageFiller, Words, page_keys

_TIMEOUT_S = 50.0
_IDLE_S = 1.0


class _Cached(End):
    """A process with one cache, which all its agents share."""

    def __init__(self, fields: Message, coordinator: Channel, peers: list[Channel]) -> None:
        super().__init__(fields, coordinator, peers)
        self.options = kvxfer.AgentOptions(transports=(fields["transport"],))
        self.random = np.random.default_rng(fields["seed"])
        num_pages = fields["num_pages"]
        self.pool = kvxfer.Pool(num_pages, PAGE_NBYTES)
        self.cache = self.pool.array((1, num_pages, PAGE_NBYTES), np.uint8)
        self.layout = kvxfer.KVLayout.from_tensor(self.cache, "lbd")
        self.pages: Words = self.cache.reshape(-1, PAGE_NBYTES).view(np.uint64)
        self.agents: list[kvxfer.Agent] = []

    def ready(self) -> None:
        """Replies when everything above is there."""

    async def aclose(self) -> None:
        for agent in self.agents:
            await agent.aclose()


class Hub(_Cached):
    """One agent that everybody writes to."""

    def __init__(self, fields: Message, coordinator: Channel, peers: list[Channel]) -> None:
        super().__init__(fields, coordinator, peers)
        self.agent = kvxfer.Agent("hub", self.options)
        self.agents.append(self.agent)
        self.region = self.agent.register("kv", self.cache, self.layout)

    def address(self) -> Message:
        return {"address": self.agent.address}

    def register(self, count: int) -> Message:
        """Registers one more region after the other, all of them the same few pages."""
        small = self.cache[:, :4]
        layout = kvxfer.KVLayout.from_tensor(small, "lbd")
        start_ns = time.perf_counter_ns()
        for number in range(count):
            self.agent.register(f"region-{number}", small, layout)
        return {"register_us": (time.perf_counter_ns() - start_ns) / 1e3 / count}

    def admit(self, count: int) -> None:
        """Lets peers write as they come."""
        for number in range(count):
            peer = self.agent.accept_blocking(f"prefill-{number}", _TIMEOUT_S)
            self.region.grant(peer, mode="write", ttl_s=LEASE_S)

    def idle(self) -> Message:
        cpu_s, start = time.process_time(), time.perf_counter()
        time.sleep(_IDLE_S)
        return {"idle_cpu_cores": (time.process_time() - cpu_s) / (time.perf_counter() - start)}

    def check(self, count: int, nbytes: int) -> Message:
        """Compares every byte that the prefills wrote."""
        num_pages = nbytes // PAGE_NBYTES // count
        for prefill in range(count):
            rows = np.arange(num_pages, dtype=np.uint32) + np.uint32(prefill * num_pages)
            wrong = PageFiller(PAGE_NBYTES).check(self.pages, rows, page_keys(prefill, num_pages=num_pages))
            if wrong is not None:
                return {"wrong": f"prefill {prefill}: {wrong}"}
        return {"wrong": ""}


class Crowd(_Cached):
    """Agents that connect to the hub and write to it."""

    regions: list[kvxfer.Region]
    remotes: list[Any]

    def join(self, address: str, count: int) -> Message:
        """Makes so many agents and connects each; the regions of the hub are known then."""
        self.agents += [kvxfer.Agent(f"prefill-{number}", self.options) for number in range(count)]
        start_ns = time.perf_counter_ns()
        peers = [agent.connect_blocking(address, _TIMEOUT_S) for agent in self.agents]
        connect_ms = (time.perf_counter_ns() - start_ns) / 1e6 / count
        self.regions = [agent.register("kv", self.cache, self.layout) for agent in self.agents]
        self.remotes = [peer.region_blocking("kv", _TIMEOUT_S) for peer in peers]
        return {"connect_ms": connect_ms}

    def write_pages(self, count: int, at_once: bool = True) -> Message:
        """Writes pages of the last agent, a transfer each: all in flight, or one after the other."""
        ids = np.arange(self.pool.num_blocks, dtype=np.uint32)
        self._write(-1, ids[:1]).wait(_TIMEOUT_S)
        transfers = []
        post_ns = 0
        start_ns = time.perf_counter_ns()
        for number in range(count):
            at = number % len(ids)
            before_ns = time.perf_counter_ns()
            transfers.append(self._write(-1, ids[at : at + 1]))
            post_ns += time.perf_counter_ns() - before_ns
            if not at_once:
                transfers[-1].wait(_TIMEOUT_S)
        for transfer in transfers:
            transfer.wait(_TIMEOUT_S)
        each_us = (time.perf_counter_ns() - start_ns) / 1e3 / count
        return {"post_us": post_ns / 1e3 / count, "each_us": each_us}

    def flood(self, nbytes: int) -> Message:
        """Every agent writes an equal share of the hub's pages at once; returns the rate of each."""
        num_pages = nbytes // PAGE_NBYTES // len(self.agents)
        shares = []
        for prefill in range(len(self.agents)):
            rows = np.arange(num_pages, dtype=np.uint32) + np.uint32(prefill * num_pages)
            PageFiller(PAGE_NBYTES).fill(self.pages, rows, page_keys(prefill, num_pages=num_pages))
            shares.append(self.random.permutation(rows).astype(np.uint32))
        start_ns = time.perf_counter_ns()
        ends_ns: dict[int, int] = {}
        transfers = [self._write(prefill, share) for prefill, share in enumerate(shares)]
        while len(ends_ns) < len(transfers):
            for prefill, transfer in enumerate(transfers):
                if prefill not in ends_ns and transfer.state != "pending":
                    transfer.wait(0)
                    ends_ns[prefill] = time.perf_counter_ns()
            time.sleep(50e-6)
        # From the first post on: who posts later waits for the same receiver.
        return {"gb_per_s_each": [num_pages * PAGE_NBYTES / (end - start_ns) for end in ends_ns.values()]}

    def _write(self, agent: int, blocks: Any) -> kvxfer.Transfer:
        region, remote = self.regions[agent], self.remotes[agent]
        return self.agents[agent].write(region, remote, blocks, blocks, timeout_s=_TIMEOUT_S)
