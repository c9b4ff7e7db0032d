"""The two worker processes of ``kvxfer bench scale``: a hub, and a crowd of agents around it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

import kvxfer
from kvxfer.bench.run.channel import Channel, Message
from kvxfer.bench.run.process import serve
from kvxfer.bench.scale.measure import PAGE_NBYTES
from kvxfer.bench.work.page_data import PageFiller, page_keys

_TIMEOUT_S = 50.0
_IDLE_S = 1.0


def _cache(num_pages: int) -> tuple[kvxfer.Pool, Any]:
    pool = kvxfer.Pool(num_pages, PAGE_NBYTES)
    return pool, pool.array((1, num_pages, PAGE_NBYTES), np.uint8)


class Hub:
    """One agent that everybody writes to."""

    def __init__(self, options: kvxfer.AgentOptions, num_pages: int) -> None:
        self.pool, self.cache = _cache(num_pages)
        self.agent = kvxfer.Agent("hub", options)
        self.layout = kvxfer.KVLayout.from_tensor(self.cache, "lbd")
        self.region = self.agent.register("kv", self.cache, self.layout)

    def handlers(self) -> dict[str, Any]:
        return {
            name: getattr(self, name) for name in ("address", "register", "admit", "idle", "usage", "check")
        }

    def close(self) -> None:
        self.agent.close()

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

    def admit(self, count: int) -> Message:
        """Lets peers write as they come."""
        for number in range(count):
            peer = self.agent.accept_blocking(f"prefill-{number}", _TIMEOUT_S)
            self.region.grant(peer, mode="write", ttl_s=3600.0)
        return {}

    def idle(self) -> Message:
        cpu_s, start = time.process_time(), time.perf_counter()
        time.sleep(_IDLE_S)
        return {"idle_cpu_cores": (time.process_time() - cpu_s) / (time.perf_counter() - start)}

    def usage(self) -> Message:
        status = Path("/proc/self/status").read_text()
        return {"rss_kib": next(int(line.split()[1]) for line in status.splitlines() if "VmRSS" in line)}

    def check(self, count: int, nbytes: int) -> Message:
        """Compares every byte that the prefills wrote."""
        num_pages = nbytes // PAGE_NBYTES // count
        pages = self.cache.reshape(-1, PAGE_NBYTES).view(np.uint64)
        for prefill in range(count):
            rows = np.arange(num_pages, dtype=np.uint32) + np.uint32(prefill * num_pages)
            wrong = PageFiller(PAGE_NBYTES).check(pages, rows, page_keys(prefill, num_pages=num_pages))
            if wrong is not None:
                return {"wrong": f"prefill {prefill}: {wrong}"}
        return {"wrong": ""}


class Crowd:
    """Agents that connect to the hub and write to it."""

    def __init__(self, options: kvxfer.AgentOptions, num_pages: int, seed: int) -> None:
        self.options = options
        self.seed = seed
        self.agents: list[kvxfer.Agent] = []
        self.peers: list[kvxfer.Peer] = []
        self.pool, self.cache = _cache(num_pages)
        self.layout = kvxfer.KVLayout.from_tensor(self.cache, "lbd")

    def handlers(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("join", "write_pages", "flood")}

    def close(self) -> None:
        for agent in self.agents:
            agent.close()

    def join(self, address: str, count: int) -> Message:
        """Makes so many agents and connects each; the regions of the hub are known then."""
        for number in range(count):
            self.agents.append(kvxfer.Agent(f"prefill-{number}", self.options))
        start_ns = time.perf_counter_ns()
        for agent in self.agents:
            self.peers.append(agent.connect_blocking(address, _TIMEOUT_S))
        connect_ms = (time.perf_counter_ns() - start_ns) / 1e6 / count
        self.regions = [agent.register("kv", self.cache, self.layout) for agent in self.agents]
        self.remotes = [peer.region_blocking("kv", _TIMEOUT_S) for peer in self.peers]
        return {"connect_ms": connect_ms}

    def write_pages(self, count: int, at_once: bool = True) -> Message:
        """Writes pages of the last agent, a transfer each: all in flight, or one after the other."""
        agent, region, remote = self.agents[-1], self.regions[-1], self.remotes[-1]
        ids = np.arange(self.pool.num_blocks, dtype=np.uint32)
        agent.write(region, remote, ids[:1], ids[:1], timeout_s=_TIMEOUT_S).wait(_TIMEOUT_S)
        transfers = []
        post_ns = 0
        start_ns = time.perf_counter_ns()
        for number in range(count):
            at = number % len(ids)
            block = ids[at : at + 1]
            before_ns = time.perf_counter_ns()
            transfers.append(agent.write(region, remote, block, block, timeout_s=_TIMEOUT_S))
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
        pages = self.cache.reshape(-1, PAGE_NBYTES).view(np.uint64)
        random = np.random.default_rng(self.seed)
        transfers = []
        shares = []
        for prefill in range(len(self.agents)):
            rows = np.arange(num_pages, dtype=np.uint32) + np.uint32(prefill * num_pages)
            PageFiller(PAGE_NBYTES).fill(pages, rows, page_keys(prefill, num_pages=num_pages))
            shares.append(random.permutation(rows).astype(np.uint32))
        starts_ns, ends_ns = [], [0] * len(shares)
        for number, (agent, share) in enumerate(zip(self.agents, shares, strict=True)):
            starts_ns.append(time.perf_counter_ns())
            transfers.append(
                agent.write(self.regions[number], self.remotes[number], share, share, timeout_s=_TIMEOUT_S)
            )
        open_ones = set(range(len(transfers)))
        while open_ones:
            for number in list(open_ones):
                if transfers[number].state != "pending":
                    transfers[number].wait(0)
                    ends_ns[number] = time.perf_counter_ns()
                    open_ones.discard(number)
            time.sleep(50e-6)
        each_nbytes = num_pages * PAGE_NBYTES
        # From the first post on: who posts later waits for the same receiver.
        return {"gb_per_s_each": [each_nbytes / (end - starts_ns[0]) for end in ends_ns]}


async def run(fields: Message, coordinator: Channel, role: str) -> None:
    """Serves as the hub or the crowd until the coordinator ends."""
    options = kvxfer.AgentOptions(transports=(fields["transport"],))
    num_pages = fields["num_pages"]
    end: Hub | Crowd = Hub(options, num_pages) if role == "hub" else Crowd(options, num_pages, fields["seed"])
    try:
        await serve(coordinator, {"open": dict, **end.handlers()})
    finally:
        end.close()
