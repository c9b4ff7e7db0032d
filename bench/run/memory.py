"""Memory that is not the engine's: for the limits, and for workloads on an engine's own tensors."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import kvxfer

_HUGE_PAGE_NBYTES = 2 << 20
# Linux 5.14; the mmap module does not name it.
_MADV_POPULATE_WRITE = 23
# Linux 6.1.
_MADV_COLLAPSE = 25
# Linux, every architecture that counts; the mmap module of Python 3.13 names it.
_MAP_NORESERVE = 0x4000
_MAP_FIXED = 0x10
_PR_SET_PTRACER = 0x59616D61


def create_shared(nbytes: int, name: str) -> int:
    """Returns a memfd of at least ``nbytes``, of reserved huge pages where enough are free, as a pool's."""
    rounded = -(-nbytes // _HUGE_PAGE_NBYTES) * _HUGE_PAGE_NBYTES
    flags = [os.MFD_HUGETLB | os.MFD_HUGE_2MB, 0] if nbytes >= _HUGE_PAGE_NBYTES else [0]
    for kind in flags:
        descriptor = -1
        try:
            descriptor = os.memfd_create(name, os.MFD_CLOEXEC | kind)
            os.ftruncate(descriptor, rounded)
            # A mapping reserves the huge pages: without enough of them it fails here, not later.
            mmap.mmap(descriptor, rounded).close()
        except OSError:
            if descriptor >= 0:
                os.close(descriptor)
            if kind == 0:
                raise
        else:
            return descriptor
    raise AssertionError("unreachable")


def map_shared(descriptor: int, nbytes: int) -> NDArray[np.uint8]:
    """Maps ``nbytes`` of a memfd as the engine's pool lies in memory: huge pages, every page there."""
    rounded = -(-nbytes // _HUGE_PAGE_NBYTES) * _HUGE_PAGE_NBYTES
    # Huge pages are mapped whole where addresses are multiples of theirs, which mmap.mmap cannot ask for:
    # the file takes the place of some of these.
    addresses = mmap.mmap(-1, rounded + _HUGE_PAGE_NBYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    everything = np.frombuffer(addresses, dtype=np.uint8)
    start = -address_of(everything) % _HUGE_PAGE_NBYTES
    _map_over(address_of(everything) + start, rounded, descriptor)
    for advice, at, length in (
        (mmap.MADV_HUGEPAGE, 0, rounded),
        *((_MADV_POPULATE_WRITE, at, mmap.PAGESIZE) for at in range(0, rounded, _HUGE_PAGE_NBYTES)),
        *(() if _huge_pages_are_off() else ((_MADV_COLLAPSE, 0, rounded),)),
        (_MADV_POPULATE_WRITE, 0, rounded),
    ):
        try:
            addresses.madvise(advice, start + at, length)
        except OSError:
            pass  # an older kernel, or one without huge pages: the first pass over it faults it in
    # The array keeps the mapping alive.
    return everything[start : start + nbytes]


def _huge_pages_are_off() -> bool:
    """Whether the machine's administrator wants none: a pool asks for none then."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return not setting.exists() or "[never]" in setting.read_text()


def _map_over(address: int, nbytes: int, descriptor: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if library.mmap(address, nbytes, access, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0) != address:
        error = ctypes.get_errno()
        raise OSError(error, f"mmap of shared memory: {os.strerror(error)}")


def allocate_private(nbytes: int) -> NDArray[np.uint8]:
    """Returns memory such as an engine's own tensors have: anonymous, private, in huge pages if it may be."""
    mapping = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, _MADV_POPULATE_WRITE):
        try:
            mapping.madvise(advice)
        except OSError:
            pass  # an older kernel, or one without huge pages: the first pass over it faults it in
    return np.frombuffer(mapping, dtype=np.uint8)[:nbytes]


def private_kind(array: NDArray[np.uint8]) -> str:
    """Returns what pages the kernel gave to private memory, for people."""
    is_huge = kvxfer.use_huge_pages(array) > array.nbytes // 2
    return "private transparent-huge" if is_huge else "private base"


def reserve(nbytes: int) -> NDArray[np.uint8]:
    """Returns addresses without memory behind them until they are touched, more than there is if need be."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, nbytes, flags), dtype=np.uint8)


def address_of(array: NDArray[np.uint8]) -> int:
    """Returns the address of the first byte."""
    return int(array.ctypes.data)


def allow_readers() -> None:
    """Lets other processes of this user read our memory where Yama would not."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        # Without Yama there is nothing to allow, and the kernel does not know the request.
        if error != errno.EINVAL:
            raise OSError(error, f"prctl(PR_SET_PTRACER): {os.strerror(error)}")
