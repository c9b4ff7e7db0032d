"""pool: memory cut into arrays, blocks by name, leaks by name."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

from kvxfer.errors import ExhaustedError, UsageError
from kvxfer.memory.pool import Pool


def test_arrays_follow_each_other_at_cache_lines() -> None:
    with Pool(4, 1024, huge_pages=False) as pool:
        first = pool.array((2, 10), np.uint16)
        second = pool.array(100)
        rest = pool.array()
        assert (second.ctypes.data - first.ctypes.data) == 64
        assert first.nbytes + second.nbytes + rest.nbytes <= pool.nbytes
        assert len(rest) == pool.nbytes - 64 - 128
        assert not rest.any()
        first[...] = 1
        assert not second.any()
        with pytest.raises(ExhaustedError, match="does not fit"):
            pool.array(1 << 20)


def test_blocks_go_out_and_come_back() -> None:
    with Pool(8, 64, huge_pages=False) as pool:
        blocks = pool.allocate(3, "req-1")
        assert blocks.ids.tolist() == [0, 1, 2]
        assert (pool.num_blocks, pool.num_free) == (8, 5)
        assert pool.owners == {"req-1": [0, 1, 2]}
        pool.free(blocks)
        pool.allocate(8, "req-2")
        with pytest.raises(ExhaustedError, match="req-2 8"):
            pool.allocate(1)
        assert pool.free_owner("req-2") == 8


def test_leaks_are_named_once() -> None:
    pool = Pool(8, 64, name="kv", huge_pages=False)
    array = pool.array(64)
    pool.allocate(2, "req-7")
    with pytest.warns(
        ResourceWarning, match=r"'kv' was closed with 2 blocks still allocated, by: req-7 \(2\)"
    ):
        assert pool.close() == {"req-7": [0, 1]}
    assert pool.close() == {}
    array[0] = 1  # the memory outlives the pool
    with pytest.raises(UsageError, match="closed"):
        pool.array(1)


def test_a_pool_of_nothing_is_refused() -> None:
    for arguments in ((0, 64), (4, 0)):
        with pytest.raises(UsageError):
            Pool(*arguments)
