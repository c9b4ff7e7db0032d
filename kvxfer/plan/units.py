"""Units: the longest stretches of tokens that lie within one block at both ends."""

from __future__ import annotations

import math
from typing import Final

from kvxfer.layout.kv_layout import KVLayout

# Ids of units and of tokens are uint32, in tables and on the wire.
_ID_BOUND: Final = 1 << 32


def same_tokens(src: KVLayout, dst: KVLayout) -> bool:
    """Says whether both ranks hold the same tokens of a sequence, in the same local numbers.

    So it is without context parallelism, and between equal ranks of equal context parallelism.
    """
    if src.cp_size == 1 or dst.cp_size == 1:
        return src.cp_size == dst.cp_size
    return (src.cp_rank, src.cp_size, src.cp_interleave) == (dst.cp_rank, dst.cp_size, dst.cp_interleave)


def unit_tokens(src: KVLayout, dst: KVLayout) -> int:
    """Returns the tokens of a unit.

    The greatest common divisor of both page sizes, and of the interleaving of each side that is
    context parallel, unless both hold the same tokens. 16 and 64 make 16, 48 and 32 make 16; equal
    pages of the same tokens are units themselves.
    """
    unit = math.gcd(src.block_tokens, dst.block_tokens)
    if same_tokens(src, dst):
        return unit
    for layout in (src, dst):
        if layout.cp_size > 1:
            unit = math.gcd(unit, layout.cp_interleave)
    return unit


def oversized(layout: KVLayout, unit: int, side: str) -> str:
    """Returns words when the ids of units of `unit` tokens do not fit 32 bits, else ``""``."""
    units = layout.block_tokens // unit
    if layout.num_blocks * units < _ID_BOUND:
        return ""
    return (
        f"pages have no common multiple in range: units of {unit} tokens make {units} a block of "
        f"{layout.block_tokens} tokens, × {layout.num_blocks} blocks at the {side} are "
        f"{layout.num_blocks * units} ids, the bound is {_ID_BOUND}"
    )
