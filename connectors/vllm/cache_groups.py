"""The engine's cache groups: layers with one block table, each a region of the worker's agent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One cache group that takes part in transfers.

    Attributes
    ----------
    index
        Its place among the engine's groups, and so in every tuple of block tables.
    name
        Of its region.
    layer_names
        In the order of the region's layers.
    spec
        Of every one of these layers.
    block_size
        Tokens of a block.
    window
        Tokens that the next one sees, itself not counted; 0 for all.
    """

    index: int
    name: str
    layer_names: tuple[str, ...]
    spec: Any
    block_size: int
    window: int

    def is_held(self, table: tuple[int, ...], num_tokens: int) -> bool:
        """Returns whether a table of `num_tokens` has every block that the last token looks at."""
        # The decode engine computes the last token of the prompt itself: it samples from it.
        first = max(num_tokens - 1 - self.window, 0) if self.window else 0
        return all(table[first // self.block_size :])


def groups_of(config: KVCacheConfig) -> tuple[CacheGroup, ...]:
    """Returns the groups of an engine that are transferred.

    Raises
    ------
    NotImplementedError
        A group is of a kind that this connector cannot hand over yet.
    """
    groups = []
    for index in config.transfer_group_ids:
        group = config.kv_cache_groups[index]
        spec = group.kv_cache_spec
        specs = (
            [spec.kv_cache_specs[name] for name in group.layer_names]
            if isinstance(spec, UniformTypeKVCacheSpecs)
            else [spec]
        )
        for other in specs:
            if not isinstance(other, FullAttentionSpec | SlidingWindowSpec) or other.tokens_per_state != 1:
                raise NotImplementedError(
                    f"KvxferConnector cannot hand over cache group {index} ({type(other).__name__}) yet: "
                    "full attention, latent attention (MLA) and sliding windows are supported"
                )
            if other != specs[0]:
                raise NotImplementedError(
                    f"KvxferConnector cannot hand over cache group {index} yet: its layers differ in shape"
                )
        window = specs[0].sliding_window - 1 if isinstance(specs[0], SlidingWindowSpec) else 0
        groups.append(
            CacheGroup(index, f"kv.{index}", tuple(group.layer_names), specs[0], spec.block_size, window)
        )
    return tuple(groups)
