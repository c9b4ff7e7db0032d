"""Huge pages for memory that another library has allocated, above all an engine's cache."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Any, Final

from kvxfer.errors import UsageError
from kvxfer.layout.tensor import covering_spans, flatten, view

_SETTINGS: Final = Path("/sys/kernel/mm/transparent_hugepage")
_COLLAPSE: Final = 25  # MADV_COLLAPSE, Linux 6.1


def use_huge_pages(memory: Any) -> int:
    """Asks the kernel to back memory with huge pages in place; addresses and bytes stay the same.

    Agents of other processes then read the memory faster (`shm` of memory outside a `Pool`), because the
    kernel looks up and holds one page instead of 512. Untouched pages stay untouched, and become huge pages
    at their first use. Call it once, before or after `Agent.register`. With NICs (`verbs`) call it before,
    because pages that a device has pinned cannot change. Other threads may read and write the memory
    meanwhile.

    Parameters
    ----------
    memory
        What `Agent.register` takes: tensors, arrays, or lists, tuples or dicts of them, on the CPU.

    Returns
    -------
    int
        Bytes that lie in huge pages now. This is less than the whole if the first and last pages are shared
        with other memory, if pages are untouched, or if memory is fragmented. It is 0 if the machine's
        administrator has switched transparent huge pages off, or the kernel is older than 6.1.

    Raises
    ------
    UsageError
        Read-only or device memory.

    Notes
    -----
    The kernel copies the content of small pages once: 0.3 to 2 s for a GiB on the machine of the README's
    figures. numpy asks for huge pages for large arrays itself; torch does not.
    """
    views = [view(tensor) for tensor in flatten(memory)]
    if any(seen.gpu is not None for seen in views):
        raise UsageError(
            "this memory lies on a GPU, where the driver chooses the pages: pass host memory",
            code="unsupported",
        )
    spans = covering_spans(views)
    if "[never]" in _read("enabled"):
        return 0
    page_nbytes = int(_read("hpage_pmd_size") or 0)
    if not page_nbytes:
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    collapsed = 0
    for first, nbytes in spans:
        begin, end = -(-first // page_nbytes) * page_nbytes, (first + nbytes) // page_nbytes * page_nbytes
        if begin >= end:
            continue
        # A hint for pages that are touched later. Its result does not matter: the kernel may not support the
        # hint.
        madvise(begin, end - begin, mmap.MADV_HUGEPAGE)
        # One at a time, because for several the kernel reports only whether the last one failed.
        collapsed += sum(
            page_nbytes
            for address in range(begin, end, page_nbytes)
            if madvise(address, page_nbytes, _COLLAPSE) == 0
        )
    return collapsed


def _read(setting: str) -> str:
    """Returns the text of a setting; "" if this kernel does not have it."""
    try:
        return (_SETTINGS / setting).read_text()
    except OSError:
        return ""
