"""The worker processes of ``kvxfer bench scale``: a hub, and a crowd of agents around it."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import numpy as np

import kvxfer
from kvxfer.bench.run.channel import Channel, Message
from kvxfer.bench.run.endpoint import LEASE_S
from kvxfer.bench.run.process import End
from kvxfer.bench.work.page_data import PageFiller, Words, page_keys

_TIMEOUT_S = 250.0
_IDLE_S = 4.0
#: After the last transfer, until heartbeats are as far apart as they come.
_QUIET_AFTER_S = 8.0
_EXPECTED = 200
#: What nobody should hold a gate for.
LONG_HOLD_MS = 2.0
# Connecting a thousand agents, and posting for them, takes seconds of both processors.
_SILENT_TIMEOUT_S = 30.0


class _Cached(End):
    """A process with one cache, which all its agents share."""

    def __init__(self, fields: Message, coordinator: Channel, peers: list[Channel]) -> None:
        super().__init__(fields, coordinator, peers)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self.options = kvxfer.AgentOptions(
            transports=(fields["transport"],),
            silent_timeout_s=fields.get("silent_timeout_s", _SILENT_TIMEOUT_S),
            meter_gate=fields.get("meter_gate", False),
            max_transfers_per_peer=fields.get("most_transfers", kvxfer.AgentOptions().max_transfers_per_peer),
        )
        self.random = np.random.default_rng(fields["seed"])
        num_pages = fields["num_pages"]
        self.page_nbytes = fields["page_nbytes"]
        self.pool = kvxfer.Pool(num_pages, self.page_nbytes)
        self.cache = self.pool.array((1, num_pages, self.page_nbytes), np.uint8)
        self.layout = kvxfer.KVLayout.from_tensor(self.cache, "lbd")
        self.pages: Words = self.cache.reshape(-1, self.page_nbytes).view(np.uint64)
        self.agents: list[kvxfer.Agent] = []

    def ready(self) -> None:
        """Replies when everything above is there."""

    def num_open(self) -> Message:
        """Transfers that are open in all agents of this process."""
        return {"open": sum(agent.stats()["transfers_open"] for agent in self.agents)}

    def held(self) -> Message:
        """Of these agents' gates: the longest hold, and how many were longer than they should be."""
        found = [agent.stats() for agent in self.agents]
        return {
            "hold_ms": max(stats["gate_longest_hold_ns"] for stats in found) / 1e6,
            "long_holds": sum(
                held
                for stats in found
                for most_ms, held in stats["gate_holds"].items()
                if most_ms > LONG_HOLD_MS
            ),
        }

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
        self.offers: list[kvxfer.Transfer] = []

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

    def admit(self, first: int, count: int, grants: bool) -> None:
        """Takes peers as they come, and lets them write."""
        for number in range(first, first + count):
            peer = self.agent.accept_blocking(f"prefill-{number}", _TIMEOUT_S)
            if grants:
                self.region.grant(peer, mode="write", ttl_s=LEASE_S)

    def memory(self) -> Message:
        """Of this process: private memory with its page tables, and all that is resident."""
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        kib = {
            name: int(rest.split()[0])
            for name, _, rest in (line.partition(":") for line in lines if "kB" in line)
        }
        return {"private_kib": kib["RssAnon"] + kib["VmPTE"], "rss_kib": kib["VmRSS"]}

    def cpu(self) -> Message:
        return {"cpu_ns": time.process_time_ns()}

    def idle(self) -> Message:
        time.sleep(_QUIET_AFTER_S)
        cpu_s, start = time.process_time(), time.perf_counter()
        time.sleep(_IDLE_S)
        return {"idle_cpu_cores": (time.process_time() - cpu_s) / (time.perf_counter() - start)}

    def offer(self, count: int) -> None:
        """Writes a page so many times, to the peers in turn, none of which lets it in yet."""
        peers = self.agent.peers
        remotes = [peer.region_blocking("kv", _TIMEOUT_S) for peer in peers]
        for number in range(count):
            remote = remotes[number % len(remotes)]
            tag = b"%d" % number
            self.offers.append(
                self.agent.write(self.region, remote, [0], [0], notify=tag, timeout_s=_TIMEOUT_S)
            )

    def end_offers(self) -> Message:
        for offer in self.offers:
            offer.wait(_TIMEOUT_S)
        return {"done": sum(offer.state == "done" for offer in self.offers)}

    def expect_and_cancel(self) -> Message:
        start_ns = time.perf_counter_ns()
        for number in range(_EXPECTED):
            self.agent.expect(b"%d" % number, [number % self.region.num_blocks]).cancel()
        return {"end_us": (time.perf_counter_ns() - start_ns) / 1e3 / _EXPECTED}

    def check(self, count: int, nbytes: int) -> Message:
        """Compares every byte that the prefills wrote."""
        num_pages = nbytes // self.page_nbytes // count
        for prefill in range(count):
            rows = np.arange(num_pages, dtype=np.uint32) + np.uint32(prefill * num_pages)
            wrong = PageFiller(self.page_nbytes).check(
                self.pages, rows, page_keys(prefill, num_pages=num_pages)
            )
            if wrong is not None:
                return {"wrong": f"prefill {prefill}: {wrong}"}
        return {"wrong": ""}


class Crowd(_Cached):
    """Agents that connect to a hub, or to hubs, and write to it."""

    def __init__(self, fields: Message, coordinator: Channel, peers: list[Channel]) -> None:
        super().__init__(fields, coordinator, peers)
        self.regions: list[kvxfer.Region] = []
        self.remotes: list[Any] = []
        self.parked: list[kvxfer.Transfer] = []

    def join(self, address: str, first: int, count: int) -> Message:
        """Makes so many agents and connects each; the regions of the hub are known then."""
        added = [kvxfer.Agent(f"prefill-{number}", self.options) for number in range(first, first + count)]
        self.agents += added
        start_ns = time.perf_counter_ns()
        peers = [agent.connect_blocking(address, _TIMEOUT_S) for agent in added]
        connect_ms = (time.perf_counter_ns() - start_ns) / 1e6 / count
        self.regions += [agent.register("kv", self.cache, self.layout) for agent in added]
        self.remotes += [peer.region_blocking("kv", _TIMEOUT_S) for peer in peers]
        return {"connect_ms": connect_ms}

    def park(self, each: int) -> None:
        """Every agent writes a page so many times, under tags that nobody expects."""
        for agent in range(len(self.agents)):
            for number in range(each):
                self.parked.append(self._write(agent, [0], notify=b"%d" % number))

    def let_in(self) -> None:
        """Every agent lets its hub write."""
        for agent, region in zip(self.agents, self.regions, strict=True):
            region.grant(agent.peers[0], mode="write", ttl_s=LEASE_S)

    def write_pages(self, count: int, at_once: bool = True, agent: int = -1) -> Message:
        """Writes pages of one agent, a transfer each: all in flight, or one after the other."""
        ids = np.arange(self.pool.num_blocks, dtype=np.uint32)
        self._write(agent, ids[:1]).wait(_TIMEOUT_S)
        transfers = []
        post_ns = 0
        start_ns = time.perf_counter_ns()
        for number in range(count):
            at = number % len(ids)
            before_ns = time.perf_counter_ns()
            transfers.append(self._write(agent, ids[at : at + 1]))
            post_ns += time.perf_counter_ns() - before_ns
            if not at_once:
                transfers[-1].wait(_TIMEOUT_S)
        for transfer in transfers:
            transfer.wait(_TIMEOUT_S)
        each_us = (time.perf_counter_ns() - start_ns) / 1e3 / count
        return {"post_us": post_ns / 1e3 / count, "each_us": each_us}

    def write_all(self) -> Message:
        """Writes every page of the cache, in one transfer and a random order; returns the rate."""
        blocks = self.random.permutation(self.pool.num_blocks).astype(np.uint32)
        start_ns = time.perf_counter_ns()
        self._write(-1, blocks).wait(_TIMEOUT_S)
        return {"gb_per_s": self.cache.nbytes / (time.perf_counter_ns() - start_ns)}

    def flood(self, nbytes: int) -> Message:
        """Every agent writes an equal share of the hub's pages at once; returns the rate of each."""
        num_pages = nbytes // self.page_nbytes // len(self.agents)
        shares = []
        for prefill in range(len(self.agents)):
            rows = np.arange(num_pages, dtype=np.uint32) + np.uint32(prefill * num_pages)
            PageFiller(self.page_nbytes).fill(self.pages, rows, page_keys(prefill, num_pages=num_pages))
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
        return {
            "gb_per_s_each": [num_pages * self.page_nbytes / (end - start_ns) for end in ends_ns.values()]
        }

    def _write(self, agent: int, blocks: Any, notify: bytes = b"") -> kvxfer.Transfer:
        region, remote = self.regions[agent], self.remotes[agent]
        return self.agents[agent].write(region, remote, blocks, blocks, notify=notify, timeout_s=_TIMEOUT_S)
