"""Pages of two tables of the same tokens, and of numbers that no page has."""

from __future__ import annotations

import pytest

pytest.importorskip("pydantic")

import numpy as np

from kvxfer import UsageError
from kvxfer.connectors.common.paging import GroupTable, pages_of, pair_pages


@pytest.mark.parametrize("src_size", [64, 288, 1024])
@pytest.mark.parametrize("dst_size", [64, 288, 1024])
@pytest.mark.parametrize("held", [0, 96, 575])
def test_of_states_the_last_moves_whatever_is_held(src_size: int, dst_size: int, held: int) -> None:
    src, dst = (
        GroupTable((0,) * (-(-600 // size) - 1) + (block,), size, 1, is_state=True)
        for size, block in ((src_size, 7), (dst_size, 9))
    )
    for pairs in (
        pair_pages(src, dst, held, 600),
        pair_pages(GroupTable(src.blocks, src_size, 1), dst, held, 600),
        pair_pages(src, GroupTable(dst.blocks, dst_size, 1), held, 600),
    ):
        assert (pairs.src.tolist(), pairs.dst.tolist()) == ([7], [9])
        assert pairs.tokens is None
        assert pairs.num_lacking == 0


@pytest.mark.parametrize("block", [2**32 + 5, np.int64(2**32 + 5), -1, 2**30])
def test_a_page_that_no_number_names_is_refused(block: int) -> None:
    assert pages_of([3, 0], 4).tolist() == [12, 13, 14, 15, 0, 0, 0, 0]
    with pytest.raises(UsageError):
        pages_of([3, block], 4)


def test_a_state_that_is_gone_is_lacking() -> None:
    pairs = pair_pages(GroupTable((0, 0), 64, 1, is_state=True), GroupTable((0, 9), 64, 1), 0, 100)
    assert (len(pairs.src), len(pairs.dst), pairs.num_lacking) == (0, 0, 1)
