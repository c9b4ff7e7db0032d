"""The helpers of NIXL's examples: raw memory by its address."""

from __future__ import annotations

import ctypes

_libc = ctypes.CDLL(None, use_errno=True)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]


def malloc_passthru(size: int) -> int:
    """Allocates `size` bytes; returns their address."""
    address = _libc.malloc(size)
    if not address:
        raise MemoryError(size)
    return int(address)


def free_passthru(address: int) -> None:
    """Frees memory from `malloc_passthru`."""
    _libc.free(address)


def ba_buf(address: int, size: int) -> None:
    """Fills memory with 0xBA."""
    ctypes.memset(address, 0xBA, size)


def verify_transfer(first: int, second: int, size: int) -> None:
    """Checks that two pieces of memory are equal.

    Raises
    ------
    AssertionError
        They differ.
    """
    if ctypes.string_at(first, size) != ctypes.string_at(second, size):
        raise AssertionError(f"{size} bytes at 0x{first:x} and at 0x{second:x} differ")
