"""Cache groups: layers with one block table, each a region of the worker's agent.

A block of most groups holds tokens. A block of others holds a state (Mamba, GDN), which stands for all
tokens before it: of a request's blocks the last one counts, and it has to be the state after exactly
the tokens that a decode engine does not compute. A decode engine computes the last token of a prompt
itself, to sample from it. Keys and values do not mind being written again, but a state would take the
token in twice. So prefill ends one token before, and what it samples there is nobody's answer: routers
do not look at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import kvxfer


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One cache group that takes part in transfers, or a part of it: of its states, or layers of one shape.

    Attributes
    ----------
    index
        Its place among the engine's groups.
    name
        Of its region.
    layer_names
        In the order of the region's layers.
    block_size
        Tokens of a block.
    window
        Tokens that a token sees, itself among them; 0 for all.
    is_state
        Whether a block holds a state and not tokens.
    table
        Its place in every tuple of block tables. Layers of several shapes, a model's and its draft's,
        have one: the scheduler is not told that they differ.
    shape
        Its place among those of one table.
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

        A decode engine computes a prompt's last token itself. Both engines free blocks before a window,
        each by its own block size, and prefill may have gone one token further.
        """
        if self.is_state:
            return table[-1] != 0
        if not self.window:
            return all(table)
        needed = max(next_token + 1 - self.window, 0)
        # Blocks that are kept here begin with the one of this token; a part of it may lie before.
        kept = max(num_tokens - self.window + 1, 0) // self.block_size * self.block_size
        return needed >= kept and all(table[kept // block_size :])


def num_held_back(groups: Sequence[CacheGroup]) -> int:
    """Returns how many of a prompt's last tokens prefill does not compute, and decode does."""
    return int(any(group.is_state for group in groups))
