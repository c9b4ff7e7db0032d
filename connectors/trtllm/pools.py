"""Describes the engine's pools as groups and layouts.

The attention kernels decide which bytes of a page belong to which head. If the user declares that they follow
the engine's own attention (`kv_heads`), the two engines may differ in tensor parallelism and block size.
Otherwise a page is moved as it is: both engines have equally many ranks, and each rank reads from the rank of
the same number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import kvxfer
from kvxfer import engine_layouts
from kvxfer.connectors.common.cache_group import CacheGroup
from kvxfer.connectors.common.regions import CacheMemory
from kvxfer.connectors.common.worker_rank import WorkerRank
from kvxfer.layout.slices import heads_of

# Arguments of `kvxfer.KVLayout.from_tensors` for data that every rank holds.
_EVERYWHERE: Final[dict[str, Any]] = {"first_head": 0, "total_heads": 1}


@dataclass(frozen=True, slots=True)
class Pools:
    """A rank's cache.

    Attributes
    ----------
    groups
        The engine's layer groups; a group with several ranges of memory has several parts.
    memory
        The memory of each group.
    num_blocks
        The blocks of the group with the most blocks.
    declared
        A text that must be equal at two engines, on all ranks.
    """

    groups: tuple[CacheGroup, ...]
    memory: tuple[CacheMemory, ...]
    num_blocks: int
    declared: str


def pools_of_tensor(
    tensor: Any, block_size: int, position: WorkerRank, model: str, kv_heads: int = 0
) -> Pools:
    """Returns the cache in one tensor: [block, layer, 2, content], or [block, layer, 1, content] for latents.

    Parameters
    ----------
    kv_heads
        The model's KV heads, if each content is [head, token, dim]; 0 if pages are moved as they are.

    Raises
    ------
    NotImplementedError
        The tensor does not have this form.
    """
    if tensor.ndim != 4 or tensor.shape[2] not in (1, 2):
        raise NotImplementedError(
            f"kvxfer reads pools [block, layer, kv, content]; this one has {tuple(tensor.shape)}"
        )
    num_blocks, num_layers, kv_factor, content = tensor.shape
    is_latent = kv_factor == 1
    if is_latent:
        num_heads, held = 1, _EVERYWHERE
    elif kv_heads:
        first_head, num_heads = heads_of(kv_heads, position.tp_size, position.tp_rank)
        held = {"first_head": first_head, "total_heads": kv_heads}
    else:
        num_heads, held = 1, _shard(position)
    if content % (num_heads * block_size):
        raise NotImplementedError(
            f"kvxfer cannot divide {content} elements of a page into {block_size} tokens of {num_heads} "
            f"heads: is kv_heads {kv_heads} the model's?"
        )
    head_dim = content // (num_heads * block_size)
    declared = f"{model}, {num_layers} layers of {kv_factor} x {tensor.dtype}"
    if kv_heads or is_latent:
        declared += f" {kv_heads} heads of {head_dim}"
    else:
        declared += f" {content} for {block_size} tokens on {position.tp_size} ranks"
    group = CacheGroup(0, "kv.0", tuple(str(layer) for layer in range(num_layers)), block_size)
    layout = engine_layouts.trtllm(
        tensor,
        num_heads=num_heads,
        block_tokens=block_size,
        head_dim=head_dim,
        model=declared,
        group=group.name,
        **held,
    )
    return Pools((group,), (CacheMemory(group, tensor, layout),), num_blocks, declared)


def pools_of_layout(layout: Any, position: WorkerRank, model: str) -> Pools:
    """Returns the cache that a `KvCacheLayout` describes: each group has one or more ranges of memory."""
    groups: list[CacheGroup] = []
    memory: list[CacheMemory] = []
    words: list[str] = []
    for table, own in enumerate(layout.groups):
        ranges = [
            *((each, False) for each in own.regions),
            *((each, True) for each in own.replicated_regions),
        ]
        for shape, (region, is_replicated) in enumerate(ranges):
            name = f"kv.{own.layer_group_id}" + (f".{shape}" if shape else "")
            group = CacheGroup(
                own.layer_group_id,
                name,
                (f"{name}/all",),  # its layers lie side by side in each page
                layout.tokens_per_block,
                window=own.window_size or 0,
                table=table,
                shape=shape,
            )
            declared = f"{model}, {name}: {_content(region)}" + (" on every rank" if is_replicated else "")
            pages = region.as_tensor()[:, None]
            memory.append(
                CacheMemory(
                    group,
                    [pages],
                    kvxfer.KVLayout.from_tensors(
                        [pages],
                        "bhd",
                        **(_EVERYWHERE if is_replicated else _shard(position)),
                        model=declared,
                        group=name,
                    ),
                )
            )
            groups.append(group)
            words.append(declared)
    if not groups:
        raise NotImplementedError("this engine describes a cache without any memory")
    num_blocks = max(region.num_slots for own in layout.groups for region in own.regions)
    declared = f"{'; '.join(words)}; {layout.tokens_per_block} tokens a block on {position.tp_size} ranks"
    return Pools(tuple(groups), tuple(memory), num_blocks, declared)


def tables_of(block_ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """Converts tables for the scheduler half, where 0 means "no block": the engine's block 0 becomes 1."""
    return [[block + 1 for block in table] for table in block_ids]


def gpu_of(tensor: Any) -> int | None:
    """Returns the GPU that holds a tensor; None for host memory."""
    device: Any = getattr(tensor, "device", None)
    return int(device.index) if getattr(device, "type", "cpu") == "cuda" else None


def _content(region: Any) -> str:
    buffers = " ".join(f"{each.layer_id}{each.role}x{each.expansion}" for each in region.buffers)
    return f"{region.size} bytes of {buffers}"


def _shard(position: WorkerRank) -> dict[str, Any]:
    return {"first_head": position.tp_rank, "total_heads": position.tp_size}
