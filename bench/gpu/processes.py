"""What one process reads out of another's cache on the same GPU, by each kind of handle."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import kvxfer
from kvxfer.bench.errors import BenchError, CheckFailedError
from kvxfer.bench.gpu import source as gpu_source
from kvxfer.bench.run.process import Worker
from kvxfer.bench.work.page_data import block_order

_SETTING = "PYTORCH_CUDA_ALLOC_CONF"
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
    Kind("cudaIpc", gpu_source.OWN, "expandable_segments:False"),
    Kind("expandable segments", gpu_source.OWN, "expandable_segments:True"),
    Kind("pool", gpu_source.POOL, "expandable_segments:False"),
)


def measure(
    kind: Kind, device: int, nbytes: int, block_nbytes: int, rounds: int, limit: Callable[[], float]
) -> tuple[str, list[float], list[float]]:
    """Reads all blocks in random order, round by round with what limits it.

    Parameters
    ----------
    nbytes
        Of the cache, about, in layers of 8 MiB; both processes have one.
    limit
        Runs a copy on this device and returns its GB/s, read + written.

    Returns
    -------
    How the memory was handed on, GB/s (read + written, by wall time) of each round, ratios to the limit.

    Raises
    ------
    CheckFailedError
        Bytes were not what they had to be.
    BenchError
        The source did not come up, or its memory cannot be read; with the reason.
    """
    import torch

    num_layers = max(1, nbytes // _LAYER_NBYTES)
    num_blocks = nbytes // num_layers // block_nbytes
    order = block_order("random", num_blocks, seed=1)
    wanted = gpu_source.cache_of(device, num_layers, num_blocks, block_nbytes)
    nbytes = wanted.numel()
    wanted = wanted[:, torch.from_numpy(order.astype(np.int64)).to(wanted.device)]
    cache = torch.zeros_like(wanted)
    torch.cuda.synchronize(device)
    every = np.arange(num_blocks, dtype=np.uint32)
    rates, ratios = [], []
    told = {"sizes": [device, num_layers, num_blocks, block_nbytes], "how": kind.how}
    try:
        with (
            Worker("gpu.source:Source", told, environment={_SETTING: kind.setting}) as source,
            kvxfer.Agent("reader", gpu_source.options(device)) as agent,
        ):
            opened = source.call("open")
            region = agent.register("cache", cache, gpu_source.layout_of(cache))
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
                raise CheckFailedError(f"what was read from another process ({kind.name}) is not what it has")
            for _ in range(rounds):
                rates.append(2 * nbytes * _NUM_READS / read(_NUM_READS) / 1e9)
                ratios.append(rates[-1] / limit())
    except kvxfer.KvxferError as error:
        raise BenchError(f"two processes, {kind.name}: {error}") from error
    return opened["handles"], rates, ratios
