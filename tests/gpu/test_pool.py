"""Tensors that torch allocates in memory that other processes can map."""

from __future__ import annotations

import gc

import pytest

from kvxfer import _native
from kvxfer.gpu import shareable_memory

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def test_tensors_of_a_block_lie_in_the_pool_and_others_do_not() -> None:
    import torch

    before = _native.gpu_pool_nbytes(0)
    outside = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    assert _native.gpu_pool_nbytes(0) == before
    with shareable_memory():
        inside = torch.arange(8 * MIB, dtype=torch.int64, device="cuda")
    held = _native.gpu_pool_nbytes(0)
    assert held >= before + 64 * MIB
    assert _native.gpu_pool_handles(0) in ("fabric", "descriptor")
    later = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    assert _native.gpu_pool_nbytes(0) == held
    # Ordinary memory for torch: its kernels write and read it, from any stream.
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        total = int((inside + outside.sum() + later.sum()).sum())
    assert total == sum(range(8 * MIB))


def test_what_tensors_give_back_serves_the_next_block() -> None:
    import torch

    with shareable_memory():
        first = torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda")
    held = _native.gpu_pool_nbytes(0)
    del first
    gc.collect()
    with shareable_memory():
        second = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")
    assert _native.gpu_pool_nbytes(0) <= held
    assert int(second.sum(dtype=torch.int64)) == 256 * MIB


def test_more_than_there_is_raises_torchs_error_with_our_words_and_leaves_nothing() -> None:
    import torch

    with shareable_memory():
        kept = torch.ones(MIB, dtype=torch.uint8, device="cuda")
    held = _native.gpu_pool_nbytes(0)
    too_much = 2 * torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(torch.OutOfMemoryError) as caught, shareable_memory():
        torch.empty(too_much, dtype=torch.uint8, device="cuda")
    assert any("has no room for" in note for note in caught.value.__notes__)
    assert _native.gpu_pool_nbytes(0) <= held  # torch frees its cached memory before it fails
    assert int(kept.sum()) == MIB
