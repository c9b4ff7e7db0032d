"""What one process reads out of another's cache on the same GPU, by each kind of handle."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import kvxfer
from kvxfer import _native
from kvxfer.bench.errors import BenchError, CheckFailedError
from kvxfer.bench.run.channel import Channel, Message
from kvxfer.bench.run.endpoint import LEASE_S
from kvxfer.bench.run.process import End, Worker
from kvxfer.bench.work.page_data import block_order
from kvxfer.gpu import shareable_memory

_SETTING = "PYTORCH_CUDA_ALLOC_CONF"
# How the source allocates its cache.
_POOL, _OWN = "pool", "torch"
_TIMEOUT_S = 60.0
# 512 pages of 16 KiB, the cache of a short prompt: whole layers go with one launch.
_LAYER_NBYTES = 8 * 1024 * 1024
# Reads that are under way at a time: posting one hides behind the copies of those before it.
_NUM_READS = 8


@dataclass(frozen=True, slots=True)
class Kind:
    """How the source allocates its cache: ``how`` it is told, with torch's ``setting``."""

    name: str
    how: str
    setting: str


KINDS = (
    Kind("cudaIpc", _OWN, "expandable_segments:False"),
    Kind("expandable segments", _OWN, "expandable_segments:True"),
    Kind("pool", _POOL, "expandable_segments:False"),
)


def measure(
    kind: Kind, device: int, nbytes: int, block_nbytes: int, rounds: int, limit: Callable[[], float]
) -> tuple[str, list[float], list[float]]:
    """Reads all blocks in random order, round by round with what limits it.

    The cache is of about ``nbytes``, in layers of 8 MiB, in both processes; ``limit`` runs a copy on this
    device and returns its GB/s. Returns how the memory was handed on, GB/s (read + written, by wall time) of
    each round, and ratios to the limit. Raises `CheckFailedError` for wrong bytes, and `BenchError` with the
    reason where the source did not come up, or its memory cannot be read.
    """
    num_layers = max(1, nbytes // _LAYER_NBYTES)
    num_blocks = nbytes // num_layers // block_nbytes
    order = block_order(num_blocks, seed=1)
    wanted = _cache_of(device, num_layers, num_blocks, block_nbytes)
    nbytes = wanted.numel()
    wanted = wanted[:, torch.from_numpy(order.astype(np.int64)).to(wanted.device)]
    cache = torch.zeros_like(wanted)
    torch.cuda.synchronize(device)
    every = np.arange(num_blocks, dtype=np.uint32)
    rates, ratios = [], []
    told = {"sizes": [device, num_layers, num_blocks, block_nbytes], "how": kind.how}
    try:
        with (
            Worker("gpu.processes:Source", told, environment={_SETTING: kind.setting}) as source,
            kvxfer.Agent("reader", _options(device)) as agent,
        ):
            opened = source.call("open")
            region = agent.register("cache", cache, kvxfer.KVLayout.from_tensor(cache, axes="lbd"))
            peer = agent.connect_blocking(opened["address"], _TIMEOUT_S)
            remote = peer.region_blocking("cache", _TIMEOUT_S)
            source.call("grant")

            def read(count: int) -> float:
                start = time.perf_counter()
                under_way = [
                    agent.read(region, remote, order, every, timeout_s=_TIMEOUT_S) for _ in range(count)
                ]
                for transfer in under_way:
                    transfer.wait(_TIMEOUT_S)
                return time.perf_counter() - start

            read(1)
            if not torch.equal(cache, wanted):
                raise CheckFailedError(
                    f"the bytes read from another process ({kind.name}) differ from its own"
                )
            for _ in range(rounds):
                rates.append(2 * nbytes * _NUM_READS / read(_NUM_READS) / 1e9)
                ratios.append(rates[-1] / limit())
    except kvxfer.KvxferError as error:
        raise BenchError(f"two processes, {kind.name}: {error}") from error
    return opened["handles"], rates, ratios


def _cache_of(device: int, num_layers: int, num_blocks: int, block_nbytes: int) -> Any:
    """Returns [num_layers, num_blocks, block_nbytes] uint8 on a GPU: the same numbers in every process."""
    numbers = torch.Generator(f"cuda:{device}").manual_seed(num_blocks)
    shape = num_layers, num_blocks, block_nbytes
    made = torch.randint(0, 256, shape, dtype=torch.uint8, device=f"cuda:{device}", generator=numbers)
    torch.cuda.synchronize(device)
    return made


def _options(device: int) -> kvxfer.AgentOptions:
    """Of either process's agent: a copy may take the whole device, as the copy that is its limit does."""
    num_ctas = torch.cuda.get_device_properties(device).multi_processor_count
    return kvxfer.AgentOptions(transports=("cuda_ipc", "unix"), gpu=device, gpu_ctas=num_ctas)


class Source(End):
    """The other process: an agent whose cache on the GPU may be read."""

    def __init__(self, fields: Message, coordinator: Channel, peers: list[Channel]) -> None:
        super().__init__(fields, coordinator, peers)
        device, *shape = fields["sizes"]
        pooled = fields["how"] == _POOL
        self._agent = kvxfer.Agent("source", _options(device))
        with shareable_memory(device) if pooled else contextlib.nullcontext():
            self._cache = _cache_of(device, *shape)
        layout = kvxfer.KVLayout.from_tensor(self._cache, axes="lbd")
        self._region = self._agent.register("cache", self._cache, layout)
        self._handles = (_native.gpu_pool_handles(device) if pooled else "") or _OWN

    def open(self) -> Message:
        return {"address": self._agent.address, "handles": self._handles}

    def grant(self) -> None:
        reader = self._agent.accept_blocking(timeout_s=_TIMEOUT_S)
        self._region.grant(reader, mode="read", ttl_s=LEASE_S)

    async def aclose(self) -> None:
        await self._agent.aclose()
