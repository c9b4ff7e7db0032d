"""free_list: blocks are out once, by name, and come back once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ExhaustedError, UsageError
from kvxfer.memory.free_list import BlockFreeList


def test_adjacent_blocks_first() -> None:
    blocks = BlockFreeList(8)
    assert blocks.allocate(3, "a").tolist() == [0, 1, 2]
    assert blocks.allocate(2, "b").tolist() == [3, 4]
    blocks.free([1])
    assert blocks.allocate(2, "c").tolist() == [1, 5]
    assert blocks.owners() == {"a": [0, 2], "b": [3, 4], "c": [1, 5]}


@pytest.mark.parametrize(
    ("ids", "code"), [([7], "out-of-range"), ([0, 0], "duplicate-block"), ([3], "invalid-argument")]
)
def test_what_cannot_come_back_changes_nothing(ids: list[int], code: str) -> None:
    blocks = BlockFreeList(4)
    blocks.allocate(2, "a")
    with pytest.raises(UsageError) as caught:
        blocks.free([1, *ids] if code == "invalid-argument" else ids)
    assert caught.value.code == code
    assert blocks.owners() == {"a": [0, 1]}


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.sampled_from("abc")), max_size=40))
def test_no_block_is_out_twice(steps: list[tuple[bool, int, str]]) -> None:
    blocks = BlockFreeList(12)
    held: dict[str, set[int]] = {}
    for take, count, owner in steps:
        if take:
            try:
                ids = blocks.allocate(count, owner).tolist()
            except ExhaustedError:
                assert count > blocks.num_free
                continue
            assert not set(ids) & set().union(*held.values())
            held.setdefault(owner, set()).update(ids)
        else:
            back = sorted(held.get(owner, ()))[:count]
            blocks.free(np.array(back, np.uint32))
            held.get(owner, set()).difference_update(back)
    assert blocks.owners() == {owner: sorted(ids) for owner, ids in held.items() if ids}
    assert blocks.num_free == 12 - sum(map(len, held.values()))
