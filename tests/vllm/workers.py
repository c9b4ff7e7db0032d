"""Worker halves over tensors in vLLM's layouts: no engine, no model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from kvxfer.connectors.common.worker_rank import WorkerRank
from kvxfer.connectors.vllm.cache_groups import SpecGroup
from kvxfer.connectors.vllm.cache_tensors import ModelCache, memory_of
from tests.connectors.workers import BLOCK_SIZE, LAYERS, NUM_HEADS, NUM_LAYERS, PATIENCE, Worker


class TensorWorker(Worker):
    """A worker whose caches are the engine's tensors, by layer."""

    def __init__(
        self,
        position: WorkerRank,
        groups: tuple[SpecGroup, ...],
        tensors: dict[str, torch.Tensor],
        cache: ModelCache,
        **settings: Any,
    ) -> None:
        self.groups, self.tensors = groups, tensors
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        super().__init__(position, memory_of(groups, tensors, cache, position), arrays, **settings)


@contextmanager
def workers(
    engine: str,
    tp_size: int = 1,
    num_blocks: int = 64,
    block_size: int = BLOCK_SIZE,
    order: str = "LBHNC",
    packed_for: str = "",
    cache_dtype: str = "auto",
    is_latent: bool = False,
    model: str = "tiny",
) -> Iterator[list[Worker]]:
    """Yields the workers of an engine; closes them in the end.

    A worker's layers lie in one tensor, in the `order` of its axes. Packed pages can be read only by workers
    with the same packing; others by their axes. A latent cache is equal on every rank.
    """
    num_heads = 1 if is_latent else NUM_HEADS // tp_size
    spec = (MLAAttentionSpec if is_latent else FullAttentionSpec)(
        block_size=block_size, num_kv_heads=num_heads, head_size=8 if is_latent else 4, dtype=torch.float32
    )
    group = SpecGroup(0, "kv.0", LAYERS, block_size, spec=spec)
    cache = ModelCache(model, cache_dtype, 1 if is_latent else NUM_HEADS, num_blocks, packed_for)
    sizes = {"L": NUM_LAYERS, "B": num_blocks, "H": num_heads, "N": block_size, "C": 8}
    # For fp8 the engine has bytes.
    dtype = torch.float32 if cache_dtype == "auto" else torch.uint8
    with ExitStack() as running:
        made: list[Worker] = []
        for rank in range(tp_size):
            tensor = torch.zeros([sizes[axis] for axis in order], dtype=dtype)
            tensor = tensor.permute(*map(order.index, "LBHNC"))
            tensors = dict(zip(LAYERS, tensor, strict=True))
            worker = TensorWorker(WorkerRank(engine, rank, tp_size), (group,), tensors, cache, **PATIENCE)
            made.append(running.enter_context(worker))
        yield made
