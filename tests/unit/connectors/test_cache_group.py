"""Which blocks of a cache group are handed over, and when a source's blocks are enough to continue."""

from __future__ import annotations

from kvxfer.connectors.common.cache_group import CacheGroup, num_held_back

BLOCK_SIZE = 4


def group(is_state: bool = False, window: int = 0) -> CacheGroup:
    return CacheGroup(0, "kv.0", (), BLOCK_SIZE, window, is_state)


def test_prompts_are_shortened_where_a_group_holds_states() -> None:
    assert num_held_back((group(), group(window=8))) == 0
    assert num_held_back((group(), group(is_state=True))) == 1


def test_of_states_the_last_one_counts() -> None:
    table = [5, 6, 7, 8]
    assert group().blocks_of(table, 9) == (5, 6, 7)
    assert group(is_state=True).blocks_of(table, 8) == (0, 6)
    assert group(is_state=True).blocks_of(table, 9) == (0, 0, 7)
    assert group(is_state=True).blocks_of([9], 1) == (9,)
    assert group(is_state=True).blocks_of([], 1) == ()
    assert group(is_state=True).can_load((0, 0, 7), BLOCK_SIZE, 9, 9)
    assert not group(is_state=True).can_load((0, 6, 0), BLOCK_SIZE, 9, 9)
    assert not group().can_load((0, 6, 7), BLOCK_SIZE, 9, 9)


def test_a_window_that_ends_where_decode_begins_has_all_that_it_looks_at() -> None:
    # Prefill has computed one token more, and freed the block that holds token 3 of ten.
    assert not group(window=7).can_load((0, 6, 7), BLOCK_SIZE, 10, 9)
    assert group(window=7).can_load((5, 6, 7), BLOCK_SIZE, 9, 9)
    assert group(window=6).can_load((0, 6, 7), BLOCK_SIZE, 10, 9)
