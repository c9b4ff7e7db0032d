"""block_table: ids are checked, and arrays of the right kind are not copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvxfer.errors import UsageError
from kvxfer.memory.block_table import BlockTable, as_ids
from kvxfer.plan.program import LOOP_DTYPE


@pytest.mark.parametrize(
    "blocks",
    [
        [7, 9],
        (7, 9),
        range(7, 11, 2),
        np.array([7, 9]),
        np.array([7, 9], np.uint8),
        iter([7, 9]),
        BlockTable([7, 9]),
    ],
)
def test_ids_from_anything(blocks: Any) -> None:
    ids = as_ids(blocks)
    assert ids.dtype == np.uint32
    assert ids.flags.c_contiguous
    assert ids.tolist() == [7, 9]


def test_uint32_is_not_copied() -> None:
    ids = np.array([1, 2], np.uint32)
    assert BlockTable(ids).ids is ids
    assert as_ids(BlockTable(ids)) is ids
    assert as_ids(ids[::2]).flags.c_contiguous


@pytest.mark.parametrize("blocks", [[], range(0), np.empty(0), np.empty(0, np.int64)])
def test_empty(blocks: Any) -> None:
    assert len(BlockTable(blocks)) == 0
    assert BlockTable(blocks).ids.dtype == np.uint32


@pytest.mark.parametrize(
    ("blocks", "code"),
    [
        ([-1], "out-of-range"),
        ([1 << 32], "out-of-range"),
        (np.array([-1]), "out-of-range"),
        ([1.5], "invalid-argument"),
        (["a"], "invalid-argument"),
        ("12", "invalid-argument"),
        (b"12", "invalid-argument"),
        ([[1], [2]], "invalid-argument"),
        ([[1], [2, 3]], "invalid-argument"),
        ([1 << 70], "invalid-argument"),
        ([True], "invalid-argument"),
        (3, "invalid-argument"),
        (range(1, -2, -1), "out-of-range"),
        (range(1 << 62), "out-of-range"),
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


@pytest.mark.parametrize(
    "ids", [[0], np.zeros(1, np.int64), np.zeros(1, np.float32), np.zeros((1, 1), np.uint32)]
)
def test_the_native_module_takes_ids_as_they_are_made_here_alone(ids: Any) -> None:
    native = pytest.importorskip("kvxfer._native", reason="the native module is not built")
    loops = np.zeros(1, LOOP_DTYPE)
    loops["num_layers"], loops["nbytes"], loops["counts"] = 1, 16, 1
    made = as_ids([0])
    assert native.expand(loops, 0, made, made).tolist() == [[0, 0, 16]]
    with pytest.raises(TypeError):
        native.expand(loops, 0, made, ids)
    with pytest.raises(TypeError):
        native.expand(loops, 0, np.zeros(4, np.uint32)[::2], made)
