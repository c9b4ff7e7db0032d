"""Makes torch allocate GPU memory that other processes can map, within a ``with`` block."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvxfer import _native
from kvxfer.errors import UsageError, translate

# Functions of native/bindings/gpu_pool.cpp that torch's CUDAPluggableAllocator calls.
_ALLOCATE, _FREE = "kvxfer_gpu_allocate", "kvxfer_gpu_free"


@contextmanager
def shareable_memory(gpu: int = 0) -> Iterator[None]:
    """Makes torch allocate in memory that other processes can map, regardless of torch's allocator settings.

    Make the cache with ``with kvxfer.gpu.shareable_memory(): cache = torch.zeros(...)`` and register it.
    Peers on this machine map it through a descriptor, and peers in an NVLink domain through a fabric handle
    if the driver gives one. torch's default memory comes from cudaMalloc and is shared through cudaIpc
    instead: freeing it while a peer has it mapped is undefined behaviour, and its segments hold other tensors
    as well.

    Parameters
    ----------
    gpu
        Index of the GPU; tensors on other GPUs are allocated as usual.

    Raises
    ------
    UsageError
        ``unsupported``: torch is missing or has no ``torch.cuda.MemPool`` (2.5 and later have it), there is
        no such GPU, or it cannot make shareable memory; with the driver's message.
    torch.OutOfMemoryError
        Raised by torch within the block; the pool's message is added as a note.

    Notes
    -----
    Physical memory comes in pieces of 2 MiB, or of the device's own granularity, each mapped only for this
    GPU. Each process has one permanent pool a GPU: torch keeps freed memory for later blocks, and the end of
    the process frees it. The first entry takes an allocation and a device synchronization; later ones take
    nothing.
    """
    torch, pool = _pool(gpu)
    _native.gpu_pool_failure()  # clears an earlier caller's failure
    try:
        with torch.cuda.use_mem_pool(pool, device=gpu):
            yield
    except torch.OutOfMemoryError as error:
        words = _native.gpu_pool_failure()
        if words:
            error.add_note(f"kvxfer: {words}")
        raise


@functools.cache
def _pool(device: int) -> tuple[Any, Any]:
    """Returns torch and a ``torch.cuda.MemPool`` on our allocator.

    Both are kept, because tensors may live to the end of the process.
    """
    try:
        import torch
    except ImportError as error:
        raise UsageError(
            f"shareable_memory() needs torch, which cannot be imported ({error}): install it",
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
    with torch.cuda.device(device):  # a pool belongs to the current device
        return torch, torch.cuda.MemPool(allocator.allocator())


@functools.cache
def _allocator(torch: Any) -> Any:
    return torch.cuda.memory.CUDAPluggableAllocator(_native.__file__, _ALLOCATE, _FREE)


def _unsupported(error: _native.NativeError) -> UsageError:
    return UsageError(f"no GPU memory can be shared here: {translate(error).args[0]}", code="unsupported")
