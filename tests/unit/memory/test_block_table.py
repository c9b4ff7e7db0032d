"""block_table: ids are checked, and arrays of the right kind are not copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvxfer.errors import UsageError
from kvxfer.memory.block_table import BlockTable, as_ids


def test_uint32_is_not_copied() -> None:
    ids = np.array([1, 2], np.uint32)
    assert BlockTable(ids).ids is ids
    assert as_ids(BlockTable(ids)) is ids
    assert as_ids(ids[::2]).flags.c_contiguous


@pytest.mark.parametrize(
    ("blocks", "code"),
    [
        ([-1], "out-of-range"),
        ([1 << 32], "out-of-range"),
        ([1.5], "invalid-argument"),
        (["a"], "invalid-argument"),
        ("12", "invalid-argument"),
        ([[1], [2]], "invalid-argument"),
        ([True], "invalid-argument"),
        (3, "invalid-argument"),
        (range(1, -2, -1), "out-of-range"),
        (range(1 << 70), "out-of-range"),
        (range(1 << 30), "invalid-argument"),
        (np.zeros((2, 2), np.uint32), "invalid-argument"),
    ],
)
def test_what_is_no_table(blocks: Any, code: str) -> None:
    with pytest.raises(UsageError) as caught:
        BlockTable(blocks)
    assert caught.value.code == code


def test_duplicates_are_found_and_named() -> None:
    table = BlockTable([5, 1, 5, 2, 1])
    assert table.duplicates().tolist() == [1, 5]
    with pytest.raises(UsageError, match="block 1 is named more than once"):
        table.require_distinct()
    BlockTable([3, 1]).require_distinct()


def test_range_is_checked() -> None:
    BlockTable([0, 15]).require_within(16)
    with pytest.raises(UsageError, match="block 16 is outside"):
        BlockTable([16]).require_within(16)


def test_is_an_array_and_a_value() -> None:
    table = BlockTable([1, 2])
    assert np.asarray(table).tolist() == [1, 2]
    assert np.asarray(table, np.int64).dtype == np.int64
    assert table == BlockTable(np.array([1, 2]))
    assert repr(BlockTable(range(20))).endswith("num_blocks=20)")
