"""Converts an engine's blocks to pages, and pairs the pages of two tables of the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import kvxfer

Ids = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class GroupTable:
    """One request's table of one cache group, at one engine.

    Attributes
    ----------
    blocks
        The engine's blocks, in the order of the tokens; 0 for none.
    block_size
        Tokens of a block.
    pages_per_block
        Pages of the region in a block.
    is_state
        Whether a block is a state: then only the last block counts, and the others are 0.
    """

    blocks: tuple[int, ...]
    block_size: int
    pages_per_block: int
    is_state: bool = False

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.block_size // self.pages_per_block

    @property
    def pages(self) -> Ids:
        """The region's pages, in the order of the tokens; 0 for none."""
        return pages_of(self.blocks, self.pages_per_block)


class PagePairs(NamedTuple):
    """The arguments for `Agent.read` and `Agent.write`.

    Attributes
    ----------
    src, dst
        Pages; equally many if `tokens` is None.
    tokens
        The tokens that move, if the two page sizes differ; None for whole pages.
    num_lacking
        Pages that the destination has and the source lacks; they are left out.
    """

    src: Ids
    dst: Ids
    tokens: range | None
    num_lacking: int


def pages_of(table: Sequence[int], pages_per_block: int) -> Ids:
    """Returns the pages of a table of the engine's blocks; a 0 (no block) becomes pages 0."""
    ids = kvxfer.BlockTable(table).ids
    if pages_per_block == 1:
        return ids
    wide = ids.astype(np.int64)[:, None]  # a product may have more than 32 bits: it is checked, not cut off
    pages = np.where(wide == 0, 0, wide * pages_per_block + np.arange(pages_per_block))
    return kvxfer.BlockTable(pages.reshape(-1)).ids


def counted(pages: Ids, layout: kvxfer.KVLayout, pages_per_block: int) -> Ids:
    """Converts page ids of tables to page ids of a region with this layout.

    In tables 0 means "no block". If an engine gives its block 0 to requests, its layouts have no null block,
    and its tables number that block 1.
    """
    return pages if layout.null_block >= 0 else pages - np.uint32(pages_per_block)


def pair_pages(src: GroupTable, dst: GroupTable, first_token: int, stop_token: int) -> PagePairs:
    """Pairs the pages of some tokens that both ends have; of states, only the last page at each end."""
    if src.is_state or dst.is_state:
        # Two engines' block sizes of states may differ: the size says where a state is taken, not what it is.
        return _both(src.pages[-1:], dst.pages[-1:])
    if src.page_size != dst.page_size:
        return PagePairs(src.pages, dst.pages, range(first_token, stop_token), 0)
    first, stop = first_token // dst.page_size, -(-stop_token // dst.page_size)
    return _both(src.pages[first:stop], dst.pages[first:stop])


def _both(src_pages: Ids, dst_pages: Ids) -> PagePairs:
    both = (src_pages != 0) & (dst_pages != 0)
    num_lacking = int(np.count_nonzero(dst_pages)) - int(np.count_nonzero(both))
    return PagePairs(src_pages[both], dst_pages[both], None, num_lacking)
