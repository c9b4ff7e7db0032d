"""One end of a benchmark: an agent, a cache in registered memory, and the peer at the other end."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any, Self

import numpy as np

import kvxfer
from kvxfer import _native
from kvxfer.bench.errors import BenchError
from kvxfer.bench.run import memory
from kvxfer.bench.run.channel import Channel, Message
from kvxfer.bench.run.limit import LimitCommands
from kvxfer.bench.work.page_data import Indices, Words

_CONNECT_TIMEOUT_S = 10.0
# Filling and checking take seconds of all cores that there may be, and machines stall; who dies is heard of.
_SILENT_TIMEOUT_S = 30.0
_REGION = "kv"


class AgentEnd:
    """An agent in a worker process, and the peer at the other end; ``async with`` closes it.

    Parameters
    ----------
    name
        Of the agent.
    transport
        ``"shm"``, ``"unix"`` or ``"tcp"``.
    remote
        Names of the peer's regions that are waited for before anything moves.
    """

    #: What kind of memory pages the kernel gave.
    page_kind = "base"

    def __init__(self, name: str, transport: str, remote: tuple[str, ...]) -> None:
        options = kvxfer.AgentOptions(transports=(transport,), silent_timeout_s=_SILENT_TIMEOUT_S)
        self.agent = kvxfer.Agent(name, options)
        self._remote_names = remote
        self._peer: kvxfer.Peer | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.agent.aclose()

    @property
    def peer(self) -> kvxfer.Peer:
        """The other end, once it is connected."""
        if self._peer is None:
            raise BenchError("no peer is connected yet")
        return self._peer

    def handlers(self) -> dict[str, Any]:
        """The commands with which a coordinator brings two ends together."""
        return {
            "open": self._open,
            "address": self._address,
            "connect": self._connect,
            "accept": self._accept,
        }

    def _open(self) -> Message:
        return {"copy_kernel": _native.COPY_KERNEL, "page_kind": self.page_kind}

    def _address(self) -> Message:
        return {"address": self.agent.address}

    def _connect(self, address: str) -> Message:
        return self._met(self.agent.connect_blocking(address, _CONNECT_TIMEOUT_S))

    def _accept(self) -> Message:
        return self._met(self.agent.accept_blocking(timeout_s=_CONNECT_TIMEOUT_S))

    def _met(self, peer: kvxfer.Peer) -> Message:
        self._peer = peer
        for name in self._remote_names:
            peer.region_blocking(name, _CONNECT_TIMEOUT_S)
        return {}


class Endpoint(AgentEnd):
    """The engine's part of one worker process with one cache; ``async with`` closes it.

    Parameters
    ----------
    name
        Of the agent.
    transport
        ``"shm"``, ``"unix"`` or ``"tcp"``.
    memory_kind
        ``"pool"`` or ``"foreign"``.
    axes, shape, dtype
        Of the cache, as `kvxfer.KVLayout.from_tensor` takes them.
    num_blocks
        The ``b`` of the axes.
    seed
        Of the order in which `allocate` names blocks.
    """

    def __init__(
        self,
        name: str,
        transport: str,
        memory_kind: str,
        *,
        axes: str,
        shape: tuple[int, ...],
        dtype: str,
        num_blocks: int,
        seed: int = 0,
    ) -> None:
        super().__init__(name, transport, (_REGION,))
        # numpy has no bfloat16; nothing here computes with it.
        element = np.dtype("uint16" if dtype == "bfloat16" else dtype)
        nbytes = math.prod(shape) * element.itemsize
        self._pool: kvxfer.Pool | None = None
        if memory_kind == "pool":
            self._pool = kvxfer.Pool(num_blocks, nbytes // num_blocks, name=name)
            self.page_kind = self._pool.page_kind
            self._cache = self._pool.array(shape, element)
        else:
            space = memory.allocate_private(nbytes)
            self.page_kind = memory.private_kind(space)
            self._cache = space.view(element).reshape(shape)
        self._random = np.random.default_rng(seed)
        layout = kvxfer.KVLayout.from_tensor(self._cache, axes, dtype=dtype)
        self.region = self.agent.register(_REGION, self._cache, layout)

    @property
    def remote(self) -> kvxfer.RegionDescriptor:
        """The peer's cache."""
        return self.peer.regions[_REGION]

    def pages(self, page_nbytes: int) -> Words:
        """Returns the cache as rows of 64-bit words, one a page, in the order of memory."""
        return self._cache.reshape(-1).view(np.uint64).reshape(-1, page_nbytes // 8)

    def allocate(self, num_blocks: int, owner: str) -> Indices:
        """Takes blocks from the pool, in an order as after a day of serving: seeded, none adjacent.

        A fresh pool hands out neighbours, which merge into long copies; that would flatter.
        """
        assert self._pool is not None
        return self._random.permuted(self._pool.allocate(num_blocks, owner).ids)

    def free(self, blocks: Indices) -> None:
        """Gives blocks back to the pool."""
        assert self._pool is not None
        self._pool.free(blocks)


def limit_commands(coordinator: Channel) -> dict[str, Any]:
    """The commands with which this worker takes part in limits."""
    return dict(LimitCommands(coordinator.descriptors.popleft).handlers())
