"""pair_units: two block tables become unit pairs that name exactly the tokens a token loop names."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvxfer.errors import UsageError
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.plan.units import pair_units
from tests.property.interpreter import unit_tokens
from tests.property.oracle import RefusedError, local_token, moves
from tests.property.strategies import (
    NUM_EXAMPLES,
    PLAIN,
    Example,
    Model,
    Rank,
    examples,
    make_layout,
    parts,
    transfers,
)

pytestmark = pytest.mark.timeout(0 if NUM_EXAMPLES > 100_000 else 300)

#: (token of the source's memory, token of the destination's), each block × block_tokens + slot.
Places = list[tuple[int, int]]


def ids(table: list[int]) -> NDArray[np.uint32]:
    return np.array(table, np.uint32)


def wanted_pairs(example: Example) -> tuple[Places, Places]:
    """Returns the tokens of whole units and the rest, in the order of the sequence, token by token."""
    src, dst = example.src, example.dst
    found = moves(src, dst, example.src_table, example.dst_table, example.tokens)
    places = {
        token: (sb * src.block_tokens + ss, db * dst.block_tokens + ds)
        for token, sb, ss, db, ds in zip(
            found.tokens, found.src_blocks, found.src_slots, found.dst_blocks, found.dst_slots, strict=True
        )
    }
    unit = unit_tokens(src, dst)
    # By the destination: a block of the source may be repeated.
    num_moved = Counter(at // unit for _, at in places.values())
    whole: Places = []
    rest: Places = []
    for place in places.values():
        (whole if num_moved[place[1] // unit] == unit else rest).append(place)
    return whole, rest


@pytest.mark.parametrize("count", parts(0.16), ids=str)
def test_pairs_name_the_tokens_that_a_loop_over_them_names(count: int) -> None:
    @examples(count)
    @given(transfers(max_tokens=40))
    def check(example: Example) -> None:
        src, dst = example.src, example.dst
        whole, rest = wanted_pairs(example)
        got = pair_units(src, dst, ids(example.src_table), ids(example.dst_table), example.tokens)
        assert got.src_ids.dtype == np.uint32
        assert got.dst_ids.dtype == np.uint32
        assert len(got.src_ids) == len(got.dst_ids)
        num_coarse = len(got.src_ids) - got.num_fine
        assert num_coarse >= 0
        unit = unit_tokens(src, dst)
        coarse = [
            (s * unit + t, d * unit + t)
            for s, d in zip(got.src_ids[:num_coarse].tolist(), got.dst_ids[:num_coarse].tolist(), strict=True)
            for t in range(unit)
        ]
        fine = list(zip(got.src_ids[num_coarse:].tolist(), got.dst_ids[num_coarse:].tolist(), strict=True))
        assert sorted(coarse) == sorted(whole), f"whole units{example!r}"
        assert sorted(fine) == sorted(rest), f"single tokens{example!r}"

    check()


@pytest.mark.parametrize("count", parts(0.03), ids=str)
def test_a_range_behind_a_table_or_from_a_null_block_is_refused(count: int) -> None:
    @examples(count)
    @given(transfers(), st.integers(0, 40), st.integers(0, 40), st.integers(0, 7))
    def check(example: Example, start: int, num: int, null: int) -> None:
        tokens = range(start, start + num)
        src = example.src
        table = list(example.src_table)
        if src.null_block >= 0 and table:
            table[null % len(table)] = src.null_block
        example = replace(example, src_table=table, tokens=tokens)
        try:
            wanted = len(moves(src, example.dst, table, example.dst_table, tokens).tokens)
        except RefusedError as refusal:
            with pytest.raises(UsageError) as caught:
                pair_units(src, example.dst, ids(table), ids(example.dst_table), tokens)
            if "null" in str(refusal):
                assert caught.value.code == "out-of-range"
            assert any(letter.isdigit() for letter in str(caught.value)), "the message has no number"
            return
        try:
            got = pair_units(src, example.dst, ids(table), ids(example.dst_table), tokens)
        except UsageError:
            # Nothing would move, but the table of an end is too short for a sequence of that length.
            assert any(
                at is not None and at >= len(names) * layout.block_tokens
                for layout, names in ((src, table), (example.dst, example.dst_table))
                for at in (local_token(layout, token) for token in range(tokens.stop))
            ), repr(example)
        else:
            num_coarse = len(got.src_ids) - got.num_fine
            assert num_coarse * unit_tokens(src, example.dst) + got.num_fine == wanted, repr(example)

    check()


@pytest.mark.parametrize("count", parts(0.02), ids=str)
def test_tables_that_differ_by_a_page_or_more_are_refused(count: int) -> None:
    model = Model(1, 1, 1, 1, "uint8", 1)

    @examples(count)
    @given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 12), st.integers(0, 12))
    def check(src_tokens: int, dst_tokens: int, num_src: int, num_dst: int) -> None:
        src, dst = (
            make_layout(model, Rank(0, 1, 0, 1), PLAIN, num_blocks=12, block_tokens=block_tokens)
            for block_tokens in (src_tokens, dst_tokens)
        )
        tables = ids(list(range(num_src))), ids(list(range(num_dst)))
        apart = abs(num_src * src.block_tokens - num_dst * dst.block_tokens)
        if apart < max(src.block_tokens, dst.block_tokens):
            got = pair_units(src, dst, *tables, None)
            assert got.num_fine == 0
            moved = min(num_src * src.block_tokens, num_dst * dst.block_tokens)
            assert len(got.src_ids) * unit_tokens(src, dst) == moved
        else:
            with pytest.raises(UsageError) as caught:
                pair_units(src, dst, *tables, None)
            assert caught.value.code == "length-mismatch"

    check()


def test_local_tokens_are_packed_in_the_order_of_the_sequence() -> None:
    # The oracle itself, against a count: it has no other reference.
    example = KVLayout(
        dtype="uint8",
        itemsize=1,
        num_blocks=8,
        block_tokens=4,
        num_kv=1,
        head_dim=1,
        first_layer=0,
        num_layers=1,
        total_layers=1,
        first_head=0,
        num_heads=1,
        total_heads=1,
        block_stride=4,
        token_stride=1,
        head_stride=0,
        dim_stride=0,
        cp_rank=1,
        cp_size=3,
        cp_interleave=2,
    )
    held = [token for token in range(24) if local_token(example, token) is not None]
    assert held == [2, 3, 8, 9, 14, 15, 20, 21]
    assert [local_token(example, token) for token in held] == list(range(8))
