"""Turns block tables into pairs of units: which source unit goes to which destination unit.

A block table names the blocks of a sequence from its token 0 on. If two ranks hold the same tokens in pages
of equal size, pair i is block i of both tables. Otherwise both tables are cut into *units*: the longest
stretches of tokens that lie within one block at both ends. With context parallelism, only the units that both
ranks hold are paired. Unequal tensor parallelism has no effect here: a program moves the heads that both ends
hold (kvxfer/plan/compile.py), and kvxfer/plan/sharding.py pairs the ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import UsageError, invalid
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.memory.block_table import as_ids
from kvxfer.plan.consecutive import consecutive

# Ids of units and of tokens are uint32, in tables and on the wire.
_ID_BOUND: Final = 1 << 32

_Ids = NDArray[np.uint32]
_Index = range | NDArray[np.int64]


# ---- units of two layouts -------------------------------------------------------------------------


def same_tokens(src: KVLayout, dst: KVLayout) -> bool:
    """Returns whether both ranks hold the same tokens of a sequence, with the same local numbers.

    This holds without context parallelism, and between equal ranks of equal context parallelism.
    """
    if src.cp_size == 1 or dst.cp_size == 1:
        return src.cp_size == dst.cp_size
    return (src.cp_rank, src.cp_size, src.cp_interleave) == (dst.cp_rank, dst.cp_size, dst.cp_interleave)


def unit_tokens(src: KVLayout, dst: KVLayout) -> int:
    """Returns the tokens of a unit.

    It is the greatest common divisor of both page sizes and, unless both ends hold the same tokens, of the
    interleaving of each context-parallel end. Pages of 16 and 64 tokens give 16; 48 and 32 give 16. Equal
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
    """Returns a message if the ids of units of `unit` tokens do not fit 32 bits, else ``""``."""
    units = layout.block_tokens // unit
    if layout.num_blocks * units < _ID_BOUND:
        return ""
    return (
        f"the page sizes have too small a common unit: units of {unit} tokens make {units} a block of "
        f"{layout.block_tokens} tokens, × {layout.num_blocks} blocks at the {side} are "
        f"{layout.num_blocks * units} ids, but the limit is {_ID_BOUND}"
    )


# ---- pairs ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """The content of a transfer's two tables.

    Attributes
    ----------
    src_ids, dst_ids
        uint32 [num_pairs]: ids of units, then of single tokens.
    num_fine
        Number of pairs, at the end, that are of single tokens.
    """

    src_ids: _Ids
    dst_ids: _Ids
    num_fine: int


def pair_units(
    src: KVLayout, dst: KVLayout, src_blocks: _Ids, dst_blocks: _Ids, tokens: range | None = None
) -> Pairs:
    """Pairs the units of two block tables, in the order of the sequence.

    Nothing moves into the destination's null block: its pairs are left out. No Python loop runs over blocks.
    This takes microseconds for a request of equal pages, and otherwise less than a millisecond for 131,072
    tokens.

    Parameters
    ----------
    src_blocks, dst_blocks
        The blocks of one sequence at either end, from its token 0 on.
    tokens
        The tokens of the sequence to move; tokens that a context-parallel rank does not hold are
        skipped. Whole units become pairs of units, and the rest of the range becomes pairs of single tokens.
        None: all tokens that both tables hold.

    Raises
    ------
    UsageError
        ``length-mismatch``: the tables cover sequences that differ by a page or more. ``out-of-range``:
        `tokens` go beyond a table, an id is not a block of its region, or a null block of the source would
        fill a real block. ``invalid-argument``: tokens that no sequence has. ``layout-mismatch``: ids of
        units would not fit 32 bits.
    """
    src_ids, dst_ids = as_ids(src_blocks), as_ids(dst_blocks)
    unit = unit_tokens(src, dst)
    ends = _End("source", src, src_ids), _End("destination", dst, dst_ids)
    for end in ends:
        if words := oversized(end.layout, unit, end.name):
            raise UsageError(words, code="layout-mismatch")
    local = same_tokens(src, dst)  # then a token's local number is the same at both ends
    if tokens is None:
        first, stop = 0, _common_tokens(ends, local)
    else:
        first, stop = _checked_range(tokens, ends)
        if local:
            first, stop = held_before(src, first), held_before(src, stop)
    # Whole units, then the single tokens before the first unit and after the last.
    first_unit = -(-first // unit)
    stop_unit = max(stop // unit, first_unit)
    before = range(first, min(first_unit * unit, stop))
    after = range(max(stop_unit * unit, before.stop), stop)
    coarse = _paired(ends, *_common(src, dst, local, range(first_unit, stop_unit), unit), unit)
    if not before and not after:
        return Pairs(*coarse, 0)
    for end in ends:
        if words := oversized(end.layout, 1, end.name):
            raise UsageError(words, code="layout-mismatch")
    fine = [_paired(ends, *_common(src, dst, local, part, 1), 1) for part in (before, after) if part]
    return Pairs(
        np.concatenate([coarse[0], *(ids for ids, _ in fine)]),
        np.concatenate([coarse[1], *(ids for _, ids in fine)]),
        sum(len(ids) for ids, _ in fine),
    )


def sequence_tokens(named: range, *, may_be_empty: bool = False) -> range:
    """Returns a caller's tokens of a sequence as a range.

    Raises
    ------
    UsageError
        ``invalid-argument``: not a range in steps of 1, or no sequence has them.
    """
    tokens = consecutive(named, "tokens", may_be_empty=True)
    if not tokens and not may_be_empty:
        raise invalid(
            "no tokens were named, so nothing would have to arrive: name at least one (None waits for all "
            "tokens of the blocks), or await the write's notification"
        )
    if tokens.start < 0 or tokens.stop < 0:
        raise invalid(
            f"tokens are numbered from 0 in the sequence, so {min(tokens.start, tokens.stop)} is not a token"
        )
    return tokens


# ---- tokens ---------------------------------------------------------------------------------------


class _End(NamedTuple):
    name: str
    layout: KVLayout
    blocks: _Ids

    @property
    def num_local(self) -> int:
        """Tokens that the table has room for."""
        return len(self.blocks) * self.layout.block_tokens

    def words(self) -> str:
        num = len(self.blocks)
        return f"{num} block{'' if num == 1 else 's'} of {self.layout.block_tokens} tokens at the {self.name}"


def _token_after(layout: KVLayout, num_local: int) -> int:
    """Returns the next token of the sequence that this rank holds after its first `num_local` tokens."""
    if layout.cp_size == 1:
        return num_local
    row, column = divmod(num_local, layout.cp_interleave)
    return (row * layout.cp_size + layout.cp_rank) * layout.cp_interleave + column


def held_before(layout: KVLayout, token: int) -> int:
    """Returns how many tokens below `token` this rank holds."""
    if layout.cp_size == 1:
        return token
    row, column = divmod(token, layout.cp_interleave * layout.cp_size)
    column -= layout.cp_rank * layout.cp_interleave
    return row * layout.cp_interleave + min(max(column, 0), layout.cp_interleave)


def _page_span(layout: KVLayout) -> int:
    """Returns how many tokens of the sequence a page spans, including those of other ranks."""
    if layout.cp_size == 1:
        return layout.block_tokens
    rows = -(-layout.block_tokens // layout.cp_interleave)
    return rows * layout.cp_interleave * layout.cp_size


def _common_tokens(ends: tuple[_End, _End], local: bool) -> int:
    """Returns how many tokens both tables hold, counted locally if `local`, else in the sequence."""
    if local:
        lengths = [end.num_local for end in ends]
        page = max(end.layout.block_tokens for end in ends)
    else:
        lengths = [_token_after(end.layout, end.num_local) for end in ends]
        page = max(_page_span(end.layout) for end in ends)
    if abs(lengths[0] - lengths[1]) >= page:
        raise UsageError(
            f"tables of different length: {ends[0].words()} have room for {lengths[0]} tokens, but "
            f"{ends[1].words()} for {lengths[1]}, a difference of a page of {page} or more: pass the blocks "
            "of the same tokens, or name the tokens to move",
            code="length-mismatch",
        )
    return min(lengths)


def _checked_range(named: range, ends: tuple[_End, _End]) -> tuple[int, int]:
    tokens = sequence_tokens(named, may_be_empty=True)
    for end in ends:
        reach = _token_after(end.layout, end.num_local)
        if tokens and tokens.stop > reach:
            raise UsageError(
                f"tokens {tokens.start} to {tokens.stop - 1} were named, but the table of {end.words()} "
                f"ends before token {reach}",
                code="out-of-range",
            )
    return tokens.start, max(tokens.start, tokens.stop)


# ---- ids of units ---------------------------------------------------------------------------------


def _common(src: KVLayout, dst: KVLayout, local: bool, units: range, tokens: int) -> tuple[_Index, _Index]:
    """Returns, for the `units` (of `tokens` each) that both ends hold, their local numbers at each end."""
    if local:
        return units, units
    # Take the units of the end with the larger interval, by their numbers in the sequence, and keep those
    # that the other end holds as well.
    swapped = dst.cp_size > src.cp_size
    sparse, other = (dst, src) if swapped else (src, dst)
    ours, held = _held_units(sparse, units, tokens)
    if other.cp_size == 1:
        theirs = held
    else:
        row = other.cp_interleave // tokens
        chunk = held // row if row > 1 else held
        turn = chunk // other.cp_size
        kept = chunk - turn * other.cp_size == other.cp_rank
        ours, held, turn = ours[kept], held[kept], turn[kept]
        theirs = turn * row + held % row
    return (theirs, ours) if swapped else (ours, theirs)


def _held_units(layout: KVLayout, units: range, tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the `units` that a context-parallel rank holds: local numbers, and numbers in the sequence."""
    row = layout.cp_interleave // tokens  # units side by side
    period = row * layout.cp_size
    first_row, stop_row = units.start // period, -(-units.stop // period)
    rows = np.arange(first_row, max(stop_row, first_row), dtype=np.int64)
    held = (rows[:, None] * period + np.arange(row, dtype=np.int64)).ravel() + layout.cp_rank * row
    low, high = np.searchsorted(held, (units.start, units.stop))
    local = np.arange(first_row * row + low, first_row * row + high, dtype=np.int64)
    return local, held[low:high]


def _paired(ends: tuple[_End, _End], src_index: _Index, dst_index: _Index, tokens: int) -> tuple[_Ids, _Ids]:
    """Turns local numbers of units of `tokens` into ids of both tables, without null destinations."""
    src_ids, src_null = _ids(ends[0], src_index, tokens)
    dst_ids, dst_null = _ids(ends[1], dst_index, tokens)
    if dst_null is not None:
        kept = ~dst_null
        src_ids, dst_ids = src_ids[kept], dst_ids[kept]
        src_null = src_null[kept] if src_null is not None else None
    if src_null is not None and src_null.any():
        at = int(src_null.argmax())
        raise UsageError(
            f"the null block {ends[0].layout.null_block} of the source holds no tokens, but block "
            f"{int(dst_ids[at]) * tokens // ends[1].layout.block_tokens} of the destination would be filled "
            f"from it ({int(src_null.sum())} pairs are affected): put the destination's null block in its "
            "place",
            code="out-of-range",
        )
    return src_ids, dst_ids


def _ids(end: _End, index: _Index, tokens: int) -> tuple[_Ids, NDArray[np.bool_] | None]:
    """Returns the ids of units, and a mask of those in a null block; None if there is none."""
    if not len(index):
        return np.empty(0, np.uint32), None
    units = end.layout.block_tokens // tokens
    first_block, stop_block = int(index[0]) // units, int(index[-1]) // units + 1
    used = end.blocks[first_block:stop_block]
    null, real = None, used
    if end.layout.null_block >= 0:
        null = used == end.layout.null_block
        if null.any():
            real = used[~null]
        else:
            null = None
    if real.size and (largest := int(real.max())) >= end.layout.num_blocks:
        raise UsageError(
            f"block {largest} is outside a region of {end.layout.num_blocks} blocks at the {end.name} "
            f"(0 to {end.layout.num_blocks - 1})",
            code="out-of-range",
        )
    if units > 1:
        inner = np.arange(units, dtype=np.uint32)
        used = (used[:, None] * np.uint32(units) + inner).ravel()
        null = np.repeat(null, units) if null is not None else None
    skipped = first_block * units
    if isinstance(index, range):
        cut = slice(index.start - skipped, index.stop - skipped)
        return used[cut], null[cut] if null is not None else None
    at = index - skipped
    return used[at], null[at] if null is not None else None
