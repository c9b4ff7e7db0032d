"""The engine's cache groups: layers with one block table, each a region of the worker's agent.

A block of most groups holds tokens. A block of a Mamba or GDN group holds a state, which stands for all
tokens before it: of a request's blocks the last one counts, and it has to be the state after exactly
the tokens that a decode engine does not compute (`kvxfer.connectors.vllm.held_back`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

import kvxfer
from kvxfer.connectors.vllm.state_parts import part_names

# Of one group.
MAX_SHAPES: Final = 4
# These and no kinds derived from them, which keep other things in a page.
_SUPPORTED = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, MambaSpec)


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One cache group that takes part in transfers, or a part of it: of its states, or layers of one shape.

    Attributes
    ----------
    index
        Its place among the engine's groups.
    table
        Its place in every tuple of block tables. Layers of several shapes, a model's and its draft's,
        have one: the scheduler is not told that they differ.
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
    is_state
        Whether a block holds a state and not tokens.
    part
        Which part of its states this is (`kvxfer.connectors.vllm.state_parts`); "" is all.
    shape
        Its place among those of one table.
    """

    index: int
    name: str
    layer_names: tuple[str, ...]
    spec: Any
    block_size: int
    window: int
    is_state: bool = False
    part: str = ""
    table: int = 0
    shape: int = 0

    def lease(self, drawn: kvxfer.LeaseToken) -> kvxfer.LeaseToken:
        """Returns the token of this region's pages, of what the scheduler drew for the table."""
        return drawn.derive(self.shape) if self.shape else drawn

    def blocks_of(self, table: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """Returns the blocks of a table that hold a prompt's first tokens; of states all but the last are 0.

        Earlier ones are states at which prompts of the same beginning may go on, and tables end with
        blocks for tokens that are not there yet.
        """
        blocks = tuple(table[: -(-num_tokens // self.block_size)])
        return (0,) * (len(blocks) - 1) + blocks[-1:] if self.is_state else blocks

    def can_load(self, table: tuple[int, ...], block_size: int, num_tokens: int, next_token: int) -> bool:
        """Returns whether a source's table of some tokens has all that is looked at from the next one on.

        A decode engine computes a prompt's last token itself, to sample from it. Both engines free
        blocks before a window, each by its own block size, and prefill may have gone one token further.
        """
        if self.is_state:
            return table[-1] != 0
        if not self.window:
            return all(table)
        needed = max(next_token + 1 - self.window, 0)
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
    groups: list[CacheGroup] = []
    num_tables = 0
    for index in config.transfer_group_ids:
        group = config.kv_cache_groups[index]
        spec = group.kv_cache_spec
        # A draft's layers may have another shape than the model's. A stage may have none of a group.
        layers: dict[Any, list[str]] = {} if group.layer_names else {spec: []}
        for name in group.layer_names:
            own = spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
            layers.setdefault(own, []).append(name)
        for each in layers:
            is_state = isinstance(each, MambaSpec)
            if type(each) not in _SUPPORTED or not (is_state or each.tokens_per_state == 1):
                raise NotImplementedError(
                    f"KvxferConnector cannot hand over cache group {index} ({type(each).__name__}) yet: "
                    "full attention, latent attention (MLA), sliding windows, Mamba and GDN are supported"
                )
            if len(layers) > (1 if is_state else MAX_SHAPES):
                raise NotImplementedError(
                    f"KvxferConnector cannot hand over cache group {index} yet: its layers have "
                    f"{len(layers)} shapes"
                )
        for shape, (each, names) in enumerate(layers.items()):
            is_state = isinstance(each, MambaSpec)
            window = each.sliding_window if isinstance(each, SlidingWindowSpec) else 0
            for at, part in enumerate(part_names(each) if is_state else ("",)):
                name = f"kv.{index}" + (f".{part or shape}" if part or shape else "")
                groups.append(
                    CacheGroup(
                        index,
                        name,
                        tuple(names),
                        each,
                        spec.block_size,
                        window,
                        is_state,
                        part,
                        num_tables + at,
                        shape,
                    )
                )
        num_tables = groups[-1].table + 1
    return tuple(groups)
