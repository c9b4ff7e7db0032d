"""GPU memory that other processes can map, for the tensors that torch makes in a ``with`` block."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvxfer import _native
from kvxfer.errors import UsageError, translate

# Of native/bindings/gpu_pool.cpp, as torch's CUDAPluggableAllocator calls them.
_ALLOCATE, _FREE = "kvxfer_gpu_allocate", "kvxfer_gpu_free"


@contextmanager
def shareable_memory(device: int = 0) -> Iterator[None]:
    """Has torch allocate in memory that other processes can map, whatever its own allocator is set to.

    ``with kvxfer.gpu.shareable_memory(): cache = torch.zeros(...)`` is what an agent registers then. Peers
    on this machine map it by a descriptor, those of an NVLink domain by a fabric handle where the driver
    gives one. Memory by cudaMalloc, which torch takes by itself, goes by cudaIpc instead: what
    is freed there while a peer has it mapped is undefined, and its segments hold other tensors as well.

    Parameters
    ----------
    device
        Which GPU; tensors of others are allocated as always.

    Raises
    ------
    UsageError
        ``unsupported``: torch is not there or has no ``torch.cuda.MemPool`` (2.5 and later have), there is
        no such GPU, or it makes no memory that can be shared; with the driver's words.
    torch.OutOfMemoryError
        From the block, as torch raises it; the pool's words are its note.

    Notes
    -----
    Physical memory comes in pieces of 2 MiB or what else the device asks for, each mapped for this GPU
    alone. There is one pool a GPU and process, which stays: what tensors give back torch keeps for later
    blocks, and the process's end frees the rest. Entering costs an allocation and a synchronization of
    the device the first time, nothing later.
    """
    torch, pool = _pool(device)
    _native.gpu_pool_failure()  # of somebody else
    try:
        with torch.cuda.use_mem_pool(pool, device=device):
            yield
    except torch.OutOfMemoryError as error:
        words = _native.gpu_pool_failure()
        if words:
            error.add_note(f"kvxfer: {words}")
        raise


@functools.cache
def _pool(device: int) -> tuple[Any, Any]:
    """Returns torch and a ``torch.cuda.MemPool`` over ours; both stay, as tensors may live to the end."""
    try:
        import torch
    except ImportError as error:
        raise UsageError(
            f"shareable_memory() is where torch allocates, and torch does not import ({error}): install it",
            code="unsupported",
        ) from None
    if not hasattr(torch.cuda, "MemPool"):
        raise UsageError(
            f"torch {torch.__version__} has no torch.cuda.MemPool: install 2.5 or later", code="unsupported"
        )
    try:
        _native.gpu_pool_check(device)
    except _native.NativeError as error:
        raise _unsupported(error) from None
    allocator = _allocator(torch)
    with torch.cuda.device(device):  # a pool is the current device's
        return torch, torch.cuda.MemPool(allocator.allocator())


@functools.cache
def _allocator(torch: Any) -> Any:
    return torch.cuda.memory.CUDAPluggableAllocator(_native.__file__, _ALLOCATE, _FREE)


def _unsupported(error: _native.NativeError) -> UsageError:
    return UsageError(f"no GPU memory can be shared here: {translate(error).args[0]}", code="unsupported")
