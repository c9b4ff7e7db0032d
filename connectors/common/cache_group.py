"""Cache groups: layers with one block table, each a region of the worker's agent.

In most groups a block holds tokens. In others a block holds a state (Mamba, GDN), which stands for all
tokens before it. Only the last block of a request's states counts, and it must be the state after exactly
the tokens that decode does not compute.

A decode engine computes the last token of a prompt itself, to sample from it. Keys and values may be written
twice, but a state must not absorb the token twice. So prefill stops one token before the end. Routers ignore
the token that prefill samples there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import kvxfer


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """A cache group that takes part in transfers, or a part of one: a part of states, layers of one shape.

    Attributes
    ----------
    index
        The group's index among the engine's groups.
    name
        The name of the region.
    layer_names
        In the order of the region's layers.
    block_size
        Tokens of a block.
    window
        Tokens that a token sees, including itself; 0 for all.
    is_state
        Whether a block holds a state and not tokens.
    table
        The group's index in every tuple of block tables. Layers of several shapes (a model's and its draft's)
        share one index, because the engine's scheduler does not distinguish them.
    shape
        The index of this shape among the shapes that share a table.
    """

    index: int
    name: str
    layer_names: tuple[str, ...]
    block_size: int
    window: int = 0
    is_state: bool = False
    table: int = 0
    shape: int = 0

    def lease(self, drawn: kvxfer.LeaseToken) -> kvxfer.LeaseToken:
        """Returns the lease token of this region's pages, derived from the one drawn for the table."""
        return drawn.derive(self.shape) if self.shape else drawn

    def blocks_of(self, table: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """Returns the blocks of a table that hold a prompt's first tokens; of states, only the last is not 0.

        Earlier states serve other prompts with the same beginning. A table may end with blocks for tokens
        that are not computed yet; they are left out.
        """
        blocks = tuple(table[: -(-num_tokens // self.block_size)])
        return (0,) * (len(blocks) - 1) + blocks[-1:] if self.is_state else blocks

    def num_blocks(self, num_tokens: int) -> int:
        """Returns about how many blocks a prompt needs at once."""
        if self.window:
            num_tokens = min(num_tokens, self.window + self.block_size)
        return 1 if self.is_state else -(-num_tokens // self.block_size)

    def can_load(self, table: tuple[int, ...], block_size: int, num_tokens: int, next_token: int) -> bool:
        """Returns whether the source's table has all blocks that `next_token` and later tokens look at.

        A decode engine computes a prompt's last token itself. Each engine frees blocks before the window,
        by its own block size, and prefill may have advanced one token further than decode.
        """
        if self.is_state:
            return table[-1] != 0
        if not self.window:
            return all(table)
        needed = max(next_token + 1 - self.window, 0)
        # The source keeps its blocks from this token's block on; the block may begin before the token.
        kept = max(num_tokens - self.window + 1, 0) // self.block_size * self.block_size
        return needed >= kept and all(table[kept // block_size :])


def num_held_back(groups: Sequence[CacheGroup]) -> int:
    """Returns how many of a prompt's last tokens prefill leaves to decode."""
    return int(any(group.is_state for group in groups))
