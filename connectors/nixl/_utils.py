"""The helpers of NIXL's examples: raw memory by its address."""

from __future__ import annotations

import ctypes
import sys

_libc = ctypes.CDLL(None, use_errno=True)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]


_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def _checked(size: int) -> int:
    # ctypes keeps the lowest bits of a number that is too large.
    if not 0 <= size <= sys.maxsize:
        raise ValueError(f"{size} is not a number of bytes")
    return size


def malloc_passthru(size: int) -> int:
    """Allocates `size` bytes; returns their address."""
    address = _libc.malloc(_checked(size))
    if not address:
        raise MemoryError(size)
    return int(address)


def free_passthru(address: int) -> None:
    """Frees memory from `malloc_passthru`."""
    _libc.free(address)


def ba_buf(address: int, size: int) -> None:
    """Fills memory with 0xBA."""
    ctypes.memset(address, 0xBA, _checked(size))


def verify_transfer(first: int, second: int, size: int) -> None:
    """Checks that two pieces of memory are equal.

    Raises
    ------
    AssertionError
        They differ.
    """
    if _libc.memcmp(first, second, _checked(size)) != 0:
        raise AssertionError(f"{size} bytes at 0x{first:x} and at 0x{second:x} differ")
