"""The other process of `kvxfer.bench.gpu.processes`: an agent whose cache on the GPU may be read.

Told (JSON) its device, the cache's layers, the blocks of each, their bytes, and how to allocate them. Prints
its address, then how its memory is handed on, and ends when nobody writes to it any more.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import kvxfer
from kvxfer import _native
from kvxfer.gpu import shareable_memory

POOL, OWN = "pool", "torch"
TTL_S = 600.0


def cache_of(device: int, num_layers: int, num_blocks: int, block_nbytes: int) -> Any:
    """Returns [num_layers, num_blocks, block_nbytes] uint8 on a GPU: the same numbers in every process."""
    import torch

    numbers = torch.Generator(f"cuda:{device}").manual_seed(num_blocks)
    shape = num_layers, num_blocks, block_nbytes
    made = torch.randint(0, 256, shape, dtype=torch.uint8, device=f"cuda:{device}", generator=numbers)
    torch.cuda.synchronize(device)
    return made


def layout_of(cache: Any) -> kvxfer.KVLayout:
    return kvxfer.KVLayout.from_tensor(cache, axes="lbd")


def options(device: int) -> kvxfer.AgentOptions:
    """Of either process's agent: a copy may take the whole device, as the copy that is its limit does."""
    import torch

    num_ctas = torch.cuda.get_device_properties(device).multi_processor_count
    return kvxfer.AgentOptions(transports=("unix", "cuda_ipc"), gpu=device, gpu_ctas=num_ctas)


def main() -> None:
    device, num_layers, num_blocks, block_nbytes, how = json.loads(sys.argv[1])
    pooled = how == POOL
    with kvxfer.Agent("source", options(device)) as agent:
        with shareable_memory(device) if pooled else contextlib.nullcontext():
            cache = cache_of(device, num_layers, num_blocks, block_nbytes)
        region = agent.register("cache", cache, layout_of(cache))
        print(agent.address, flush=True)
        print((_native.gpu_pool_handles(device) if pooled else "") or OWN, flush=True)
        region.grant(agent.accept_blocking(timeout_s=60), mode="read", ttl_s=TTL_S)
        print("granted", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
