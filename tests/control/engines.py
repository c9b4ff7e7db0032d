"""Agents with caches, and a daemon's pool, for tests of pages."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer import Agent, AgentOptions, KVLayout, LeaseToken, RegionDescriptor
from kvxfer.control.host_pool.page import PageKey, Salt
from kvxfer.control.host_pool.page_layout import layout_digest
from kvxfer.control.host_pool.page_leases import LeasedPages
from kvxfer.control.host_pool.page_pool import PagePool, Parked
from kvxfer.control.own.own_agent import OwnAgent, RemoteRegion
from kvxfer.errors import PeerError
from kvxfer.lease import Lease

# Layers, K and V, blocks, tokens, heads, dim.
SHAPE = (3, 2, 24, 8, 4, 32)
SALT = Salt("tenant", "model", "1")
#: No agent is lost because it is slow.
PATIENT: Mapping[str, Any] = {"silent_timeout_s": 60.0, "heartbeat_interval_s": 0.2, "secret": b""}
BOUND_S = 30.0
LARGE = (8, 2, 64, 32, 4, 128)  # 32 MiB
# Slabs of five pages.
SLAB = 5 * math.prod(SHAPE) // SHAPE[2] * 2
SMALL_SLABS = {"slab_nbytes": SLAB}


def options(transport: str | None = None, **changes: Any) -> AgentOptions:
    """Returns options of a patient agent; with a transport, of an agent that has only that one."""
    if transport is not None:
        changes["transports"] = (transport,)
    return AgentOptions(**{**PATIENT, **changes})


class Engine:
    """An agent in this process, with a cache that others read and write."""

    def __init__(
        self,
        name: str,
        axes: str = "l2bthd",
        shape: Sequence[int] = SHAPE,
        agent_options: AgentOptions | None = None,
        **held: Any,
    ) -> None:
        self.agent = Agent(name, agent_options or options())
        #: In the canonical order of axes, whatever the order in memory is.
        self.cache: NDArray[np.uint16]
        order = ["l2bthd".index(axis) for axis in axes]
        memory = np.zeros([shape[axis] for axis in order], np.uint16)
        self.cache = memory.transpose(np.argsort(order))
        self.layout = KVLayout.from_tensor(memory, axes, **held)
        self.region = self.agent.register("kv", memory, self.layout)

    def fill(self, seed: int) -> None:
        """Writes bytes that depend on the seed and the position."""
        self.cache[:] = np.random.default_rng(seed).integers(0, 1 << 16, self.cache.shape, np.uint16)

    def sums(self, blocks: Sequence[int]) -> list[int]:
        """Returns a checksum of each block."""
        return [zlib.crc32(np.ascontiguousarray(self.cache[:, :, block]).tobytes()) for block in blocks]

    @property
    def place(self) -> RemoteRegion:
        """Returns how a request names the cache."""
        return RemoteRegion(self.agent.name, "kv", self.agent.address)

    def keys(self, names: Sequence[str], salt: Salt = SALT) -> list[PageKey]:
        """Returns keys of pages in the engine's layout."""
        return [PageKey(*salt, layout_digest(self.layout), name) for name in names]

    async def fetch(self, part: LeasedPages, blocks: Sequence[int] | None = None) -> list[int]:
        """Reads leased pages, as an engine on any node would, and returns their checksums here."""
        region = RegionDescriptor.from_bytes(part.region.to_bytes())
        token = LeaseToken.parse(str(part.token))
        await self.agent.connect(region)
        into = list(range(len(part.blocks))) if blocks is None else list(blocks)
        await self.agent.read(self.region, region, part.blocks, into, lease=token, timeout_s=BOUND_S)
        return self.sums(into)

    def close(self) -> None:
        self.agent.close()


@dataclass
class AttachedEngine:
    """What a daemon knows of an attached engine."""

    engine: Engine
    leases: dict[int, Lease] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.engine.agent.name

    @property
    def incarnation(self) -> str:
        return self.engine.agent.incarnation.hex()

    @property
    def address(self) -> str:
        return self.engine.agent.address


class Attached:
    """Engines that grant leases on request, without a socket in between."""

    def __init__(self, *engines: Engine, deaf_to: str = "") -> None:
        self.deaf_to = deaf_to
        self.agents = {engine.agent.incarnation.hex(): AttachedEngine(engine) for engine in engines}

    async def call(
        self, incarnation: str, verb: str, args: Mapping[str, Any], timeout_s: float = 10.0
    ) -> dict[str, Any]:
        attached = self.agents[incarnation]
        if verb == self.deaf_to:
            raise PeerError("it is gone", code="peer-lost")
        if verb == "grant.revoke":
            await attached.leases.pop(args["lease"]).revoke()
            return {"state": "revoked"}
        assert verb == "grant.grant"
        region = attached.engine.agent.regions[args["region"]]
        lease = region.grant(args["holder"], args["blocks"], args["mode"], args["ttl_s"])
        number = len(attached.leases) + 1
        attached.leases[number] = lease
        return {"lease": number, "token": str(lease.token)}


class Daemon:
    """A daemon's agent and its pool."""

    def __init__(
        self, node: str = "n", nbytes: int = 1 << 22, agent_options: AgentOptions | None = None, **more: Any
    ) -> None:
        self.own = OwnAgent(node, agent_options or options())
        self.gone: list[tuple[str, str]] = []
        self.there: list[str] = []

        async def on_parked(keys: list[PageKey]) -> None:
            await asyncio.sleep(0)
            self.there += [key.key for key in keys]

        def on_dropped(keys: list[PageKey], why: str) -> None:
            self.gone += [(key.key, why) for key in keys]

        self.pool = PagePool(
            self.own,
            nbytes,
            **{"on_parked": on_parked, "on_dropped": on_dropped, "huge_pages": False, **more},
        )

    async def aclose(self) -> None:
        await self.pool.aclose()
        await self.own.aclose()


MakeEngine = Callable[..., Engine]
MakeDaemon = Callable[..., Daemon]


def names(count: int, first: int = 0) -> list[str]:
    return [f"k{number}" for number in range(first, first + count)]


async def parked(daemon: Daemon, engine: Engine, count: int, first: int = 0, salt: Salt = SALT) -> Parked:
    """Parks blocks of an engine under their numbers as keys."""
    lease = engine.region.grant(daemon.own.name, ttl_s=BOUND_S)
    async with lease:
        return await daemon.pool.park(
            salt, engine.place, range(first, first + count), names(count, first), lease=lease.token
        )
