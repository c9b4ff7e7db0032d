"""pair_units: which unit of one table goes to which unit of the other, worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvxfer.errors import UsageError
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.plan.units import Pairs, pair_units, unit_tokens


def pages(block_tokens: int, *, num_blocks: int = 100, **fields: Any) -> KVLayout:
    """A latent cache of 1-byte elements: nothing but its pages matters here."""
    values: dict[str, Any] = {
        "dtype": "opaque",
        "itemsize": 1,
        "num_blocks": num_blocks,
        "block_tokens": block_tokens,
        "num_kv": 1,
        "head_dim": 1,
        "first_layer": 0,
        "num_layers": 1,
        "total_layers": 1,
        "first_head": 0,
        "num_heads": 1,
        "total_heads": 1,
        "block_stride": block_tokens,
        "token_stride": 1 if block_tokens > 1 else 0,
        "head_stride": 0,
        "dim_stride": 0,
    }
    return KVLayout(**(values | fields))


def table(*ids: int) -> NDArray[np.uint32]:
    return np.array(ids, np.uint32)


def listed(pairs: Pairs) -> tuple[list[int], list[int], int]:
    assert pairs.src_ids.dtype == pairs.dst_ids.dtype == np.uint32
    return pairs.src_ids.tolist(), pairs.dst_ids.tolist(), pairs.num_fine


# ---- which units -----------------------------------------------------------------------------------

HALF = pages(4, cp_rank=1, cp_size=2, cp_interleave=2)
NULL = pages(16, null_block=0)
SEVEN_IS_NULL = pages(2, null_block=7)
PAIRED = {
    "equal pages": (pages(16), pages(16), [7, 9, 7], [3, 4, 5], None, ([7, 9, 7], [3, 4, 5], 0)),
    "empty tables": (pages(16), pages(64), [], [], None, ([], [], 0)),
    # Units of 16 tokens, 4 in a block of 64: block 3 has units 12 to 15.
    "parts of a large page": (
        *(pages(16), pages(64), [5, 6, 7, 8, 9, 10, 11, 12], [3, 1], None),
        ([5, 6, 7, 8, 9, 10, 11, 12], [12, 13, 14, 15, 4, 5, 6, 7], 0),
    ),
    # 48 and 32 tokens: units of 16; 3 in a source block, 2 in a destination block.
    "a common divisor": (
        *(pages(48), pages(32), [2, 0], [10, 11, 12], None),
        ([6, 7, 8, 0, 1, 2], [20, 21, 22, 23, 24, 25], 0),
    ),
    # Tokens 6 to 17 of pages of 4: tokens 6, 7 (block 9), units 8 to 15 (blocks 11, 2), 16, 17.
    "ends of a range": (
        *(pages(4), pages(4), [7, 9, 11, 2, 5], [0, 1, 2, 3, 4], range(6, 18)),
        ([11, 2, 9 * 4 + 2, 9 * 4 + 3, 5 * 4, 5 * 4 + 1], [2, 3, 1 * 4 + 2, 1 * 4 + 3, 4 * 4, 4 * 4 + 1], 4),
    ),
    "a token of unlike pages": (pages(4), pages(6), [3, 8], [2], range(5, 6), ([33], [2 * 6 + 5], 1)),
    "null blocks": (pages(4), SEVEN_IS_NULL, [1, 2], [7, 5, 7, 6], range(8), ([3, 5], [5, 6], 0)),
    "fine null blocks": (
        *(pages(4), SEVEN_IS_NULL, [1, 2], [7, 5, 7, 6], range(1, 7)),
        ([3, 2 * 4 + 2], [5, 6 * 2], 1),
    ),
    # Rank 1 of 2 in turns of 2 tokens: sequence tokens 2, 3, 6, 7, 10, 11, 14, 15 are its 0 to 7.
    # Units of the source: 10, 11, 12, 13; of the destination units 1, 3, 5, 7 of the sequence.
    "an interleaved source": (
        HALF,
        pages(4),
        [5, 6],
        [1, 2, 3, 4],
        None,
        ([10, 11, 12, 13], [3, 5, 7, 9], 0),
    ),
    # Sequence tokens 0, 1, 4, 5: units 0 and 2 of block 3 (4 units), both units of block 9.
    "an interleaved destination": (
        *(pages(8), pages(4, cp_rank=0, cp_size=2, cp_interleave=2), [3], [9], None),
        ([12, 14], [18, 19], 0),
    ),
    # Held: 3 (local 1), 6 (local 2), each without its neighbour.
    "tokens of other ranks": (
        *(HALF, pages(8), [5], [1], range(3, 7)),
        ([5 * 4 + 1, 5 * 4 + 2], [8 + 3, 8 + 6], 2),
    ),
    # Of 12 tokens one by one: rank 1 of 2 has 1 3 5 7 9 11, rank 2 of 3 has 2 5 8 11.
    # 5 is local 2 at the source (block 11) and 1 at the destination; 11 is 5 (block 12) and 3.
    "different divisions": (
        *(pages(2, cp_rank=1, cp_size=2), pages(4, cp_rank=2, cp_size=3), [10, 11, 12], [7], None),
        ([22, 25], [29, 31], 0),
    ),
    # Local tokens 0 to 5 are tokens 2, 3, 6, 7, 10, 11: block 5 whole, then two tokens of block 6.
    "equal ranks": (HALF, HALF, [5, 6], [8, 9], range(12), ([5, 24, 25], [8, 36, 37], 2)),
}
for tokens in (range(0), range(5, 5), range(99, 99), range(7, 3)):
    PAIRED[f"no token: {tokens}"] = pages(4), pages(4), [1], [1], tokens, ([], [], 0)


@pytest.mark.parametrize("name", PAIRED)
def test_units_are_paired(name: str) -> None:
    src, dst, src_blocks, dst_blocks, tokens, expected = PAIRED[name]
    assert listed(pair_units(src, dst, table(*src_blocks), table(*dst_blocks), tokens)) == expected


def test_interleaved_tokens_have_units_of_their_turn() -> None:
    assert unit_tokens(HALF, pages(4)) == 2


# ---- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("src_tokens", "dst_tokens", "src_blocks", "dst_blocks", "numbers"),
    [
        (16, 16, 3, 4, ("3 blocks of 16", "4 blocks of 16", "48", "64")),
        (64, 16, 2, 4, ("2 blocks of 64", "4 blocks of 16", "128", "64")),
        (16, 64, 0, 1, ("0 blocks of 16", "1 block of 64", "64")),
    ],
)
def test_tables_that_differ_by_a_page_are_refused(
    src_tokens: int, dst_tokens: int, src_blocks: int, dst_blocks: int, numbers: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError, match="different length") as caught:
        pair_units(
            pages(src_tokens),
            pages(dst_tokens),
            np.arange(src_blocks, dtype=np.uint32),
            np.arange(dst_blocks, dtype=np.uint32),
            None,
        )
    assert caught.value.code == "length-mismatch"
    for number in numbers:
        assert number in str(caught.value)


# ---- token ranges ---------------------------------------------------------------------------------


def test_tokens_beyond_a_table_are_refused() -> None:
    with pytest.raises(
        UsageError, match=r"tokens 2 to 8 .* 2 blocks of 4 tokens at the destination"
    ) as caught:
        pair_units(pages(4), pages(4), table(1, 2, 3), table(9, 8), range(2, 9))
    assert caught.value.code == "out-of-range"
    assert "token 8" in str(caught.value)


@pytest.mark.parametrize("tokens", [range(0, 8, 2), range(8, 0, -1), range(-4, 4), range(-1), [0, 1], 4])
def test_what_are_no_tokens_of_a_sequence_is_refused(tokens: Any) -> None:
    with pytest.raises(UsageError, match=r"^tokens ") as caught:
        pair_units(pages(4), pages(4), table(1, 2), table(9, 8), tokens)
    assert caught.value.code == "invalid-argument"


# ---- null blocks and ids --------------------------------------------------------------------------


def test_a_null_source_of_a_real_destination_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"null block 0 of the source .* block 8 of the destination"
    ) as caught:
        pair_units(pages(16, null_block=0), pages(16, null_block=0), table(0, 5), table(8, 9), None)
    assert caught.value.code == "out-of-range"


@pytest.mark.parametrize(("src_tokens", "dst_tokens"), [(16, 16), (16, 32)])
def test_ids_of_no_block_are_refused_before_they_wrap(src_tokens: int, dst_tokens: int) -> None:
    src, dst = pages(src_tokens, num_blocks=10), pages(dst_tokens)
    dst_blocks = table(1) if dst_tokens == 32 else table(1, 2)
    with pytest.raises(UsageError, match=r"block 10 .* 10 blocks at the source") as caught:
        pair_units(src, dst, table(1, 10), dst_blocks, None)
    assert caught.value.code == "out-of-range"


def test_unit_ids_that_need_more_than_32_bits_are_refused() -> None:
    src, dst = pages(1 << 12, num_blocks=1 << 20), pages((1 << 12) + 1, num_blocks=8)
    with pytest.raises(
        UsageError, match=r"too small a common unit.* 4096 .* 1048576 .* 4294967296"
    ) as caught:
        pair_units(src, dst, table(0), table(0), None)
    assert caught.value.code == "layout-mismatch"
    equal = pages(1 << 12, num_blocks=1 << 20)
    assert listed(pair_units(equal, equal, table(5), table(6), None)) == ([5], [6], 0)
    with pytest.raises(UsageError, match="too small a common unit"):  # single tokens do not fit
        pair_units(equal, equal, table(5), table(6), range(3))


# ---- context parallelism --------------------------------------------------------------------------


def test_the_reach_of_a_rank_is_told_in_tokens_of_the_sequence() -> None:
    # One block of 4 of rank 0 of 2, in turns of 2: tokens 0, 1, 4, 5; token 8 has no place.
    src = pages(4, cp_rank=0, cp_size=2, cp_interleave=2)
    assert pair_units(src, pages(8), table(1), table(1), range(8)).num_fine == 0
    with pytest.raises(UsageError, match="1 block of 4 tokens at the source ends before token 8"):
        pair_units(src, pages(8), table(1), table(1, 2), range(9))
