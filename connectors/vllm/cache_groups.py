"""The engine's cache groups: layers with one block table, each a region of the worker's agent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

# These and no kinds derived from them, which keep other things in a page.
_SUPPORTED = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)


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
        Tokens that a token sees, itself among them; 0 for all.
    """

    index: int
    name: str
    layer_names: tuple[str, ...]
    spec: Any
    block_size: int
    window: int

    def can_load(self, table: tuple[int, ...], block_size: int, num_tokens: int) -> bool:
        """Returns whether a source's table has all that is looked at from the prompt's last token on.

        A decode engine computes the last token itself, to sample from it. Both engines free blocks
        before a window, each by its own block size, and prefill has gone one token further.
        """
        if not self.window:
            return all(table)
        needed = max(num_tokens - self.window, 0)
        # Blocks that are kept here begin with the one of this token; a part of it may lie before.
        kept = max(num_tokens - self.window + 1, 0) // self.block_size * self.block_size
        return needed >= kept and all(table[kept // block_size :])


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
            if type(other) not in _SUPPORTED or other.tokens_per_state != 1:
                raise NotImplementedError(
                    f"KvxferConnector cannot hand over cache group {index} ({type(other).__name__}) yet: "
                    "full attention, latent attention (MLA) and sliding windows are supported"
                )
            if other != specs[0]:
                raise NotImplementedError(
                    f"KvxferConnector cannot hand over cache group {index} yet: its layers differ in shape"
                )
        window = specs[0].sliding_window if isinstance(specs[0], SlidingWindowSpec) else 0
        groups.append(
            CacheGroup(index, f"kv.{index}", tuple(group.layer_names), specs[0], spec.block_size, window)
        )
    return tuple(groups)
