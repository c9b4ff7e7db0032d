"""One end of a benchmark: an agent, caches in registered memory, and the peer at the other end."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvxfer
from kvxfer import _native
from kvxfer.bench.errors import BenchError
from kvxfer.bench.run import memory
from kvxfer.bench.run.channel import Channel, Message
from kvxfer.bench.run.limit import LimitSide
from kvxfer.bench.run.process import End
from kvxfer.bench.work.page_data import Indices, Words

_CONNECT_TIMEOUT_S = 10.0
_PATH_TIMEOUT_S = 5.0
# Filling and checking take seconds of all cores that there may be, and machines stall; who dies is heard of.
_SILENT_TIMEOUT_S = 30.0
#: Longer than any run: the lease is not what is measured.
LEASE_S = 3600.0


class Space:
    """Memory of an agent's pool, or private memory such as an engine's own tensors have.

    ``kind`` is ``"pool"`` or ``"foreign"``; a pool has ``num_blocks`` of equal size.
    """

    def __init__(self, kind: str, nbytes: int, num_blocks: int = 1, name: str = "") -> None:
        self.pool = kvxfer.Pool(num_blocks, nbytes // num_blocks, name=name) if kind == "pool" else None
        if self.pool is not None:
            self.array: NDArray[np.uint8] = self.pool.array(nbytes)
            #: What kind of memory pages the kernel gave, for people.
            self.page_kind: str = self.pool.page_kind
        else:
            self.array = memory.allocate_private(nbytes)
            self.page_kind = memory.private_kind(self.array)


class Cache:
    """A region of an agent, and the blocks in it.

    ``axes``, ``shape`` and ``dtype`` are as `kvxfer.KVLayout.from_tensor` takes them; the ``b`` of the axes
    is ``num_blocks``. ``seed`` is of the order in which `allocate` names blocks.
    """

    def __init__(
        self,
        agent: kvxfer.Agent,
        name: str,
        memory_kind: str,
        *,
        axes: str,
        shape: tuple[int, ...],
        dtype: str,
        num_blocks: int,
        seed: int = 0,
    ) -> None:
        # numpy has no bfloat16; nothing here computes with it.
        element = np.dtype("uint16" if dtype == "bfloat16" else dtype)
        space = Space(memory_kind, math.prod(shape) * element.itemsize, num_blocks, name)
        self.page_kind = space.page_kind
        self._pool = space.pool
        self._array = space.array.view(element).reshape(shape)
        self._random = np.random.default_rng(seed)
        layout = kvxfer.KVLayout.from_tensor(self._array, axes, dtype=dtype)
        self.region = agent.register(name, self._array, layout)

    def pages(self, page_nbytes: int) -> Words:
        """Returns the cache as rows of 64-bit words, one a page, in the order of memory."""
        return self._array.reshape(-1).view(np.uint64).reshape(-1, page_nbytes // 8)

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


class AgentEnd(End):
    """An agent in a worker process, and the peer at the other end.

    ``remote`` names the peer's regions that are waited for before anything moves, ``device`` an RDMA
    device that everything goes over; ``more`` are options of the agent.
    """

    #: What kind of memory pages the kernel gave.
    page_kind = "base"

    def __init__(
        self,
        name: str,
        transport: str,
        coordinator: Channel,
        peers: Sequence[Channel] = (),
        remote: tuple[str, ...] = ("kv",),
        device: str = "",
        **more: Any,
    ) -> None:
        super().__init__({}, coordinator, peers)
        #: This end's part of the machine's limit.
        self.limit = LimitSide(coordinator)
        if device:
            more |= {"transport_options": {"verbs.devices": device}, "require": ("verbs",)}
        options = kvxfer.AgentOptions(transports=(transport,), silent_timeout_s=_SILENT_TIMEOUT_S, **more)
        self.agent = kvxfer.Agent(name, options)
        self._transport = transport
        self._remote_names = remote
        self._peer: kvxfer.Peer | None = None
        self._cpu_ns = 0

    async def aclose(self) -> None:
        await self.agent.aclose()

    @property
    def peer(self) -> kvxfer.Peer:
        """The other end, once it is connected."""
        if self._peer is None:
            raise BenchError("no peer is connected yet")
        return self._peer

    def start_cpu(self) -> None:
        self._cpu_ns = time.process_time_ns()

    def cpu_ns(self) -> int:
        """Processor time of all threads since `start_cpu`."""
        return time.process_time_ns() - self._cpu_ns

    # ---- commands -----------------------------------------------------------------------------

    def open(self) -> Message:
        return {"copy_kernel": _native.COPY_KERNEL, "page_kind": self.page_kind}

    def address(self) -> Message:
        return {"address": self.agent.address}

    def connect(self, address: str) -> None:
        self._met(self.agent.connect_blocking(address, _CONNECT_TIMEOUT_S))

    def accept(self) -> None:
        self._met(self.agent.accept_blocking(timeout_s=_CONNECT_TIMEOUT_S))

    def _met(self, peer: kvxfer.Peer) -> None:
        self._peer = peer
        for name in self._remote_names:
            peer.region_blocking(name, _CONNECT_TIMEOUT_S)
        # An end's rails come up a moment after the other's: until then its bytes go by what is up. What never
        # comes up is told by who looks at what they went over.
        give_up_at = time.monotonic() + _PATH_TIMEOUT_S
        while time.monotonic() < give_up_at and any(
            peer.regions[name].path != self._transport for name in self._remote_names
        ):
            time.sleep(0.001)
