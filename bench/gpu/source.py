"""The other process of `kvxfer.bench.gpu.processes`: an agent whose cache on the GPU may be read."""

from __future__ import annotations

import contextlib
from typing import Any

import kvxfer
from kvxfer import _native
from kvxfer.bench.run.channel import Channel, Message
from kvxfer.bench.run.endpoint import LEASE_S
from kvxfer.bench.run.process import End
from kvxfer.gpu import shareable_memory

POOL, OWN = "pool", "torch"
_TIMEOUT_S = 50.0


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


class Source(End):
    """An agent with a cache on the GPU; ``sizes``: its device, layers, blocks of each, bytes of those."""

    def __init__(self, fields: Message, coordinator: Channel, peers: list[Channel]) -> None:
        super().__init__(fields, coordinator, peers)
        device, *shape = fields["sizes"]
        pooled = fields["how"] == POOL
        self._agent = kvxfer.Agent("source", options(device))
        with shareable_memory(device) if pooled else contextlib.nullcontext():
            self._cache = cache_of(device, *shape)
        self._region = self._agent.register("cache", self._cache, layout_of(self._cache))
        self._handles = (_native.gpu_pool_handles(device) if pooled else "") or OWN

    def open(self) -> Message:
        return {"address": self._agent.address, "handles": self._handles}

    def grant(self) -> None:
        reader = self._agent.accept_blocking(timeout_s=_TIMEOUT_S)
        self._region.grant(reader, mode="read", ttl_s=LEASE_S)

    async def aclose(self) -> None:
        await self._agent.aclose()
