"""Huge pages under memory that somebody else has allocated, an engine's cache above all."""

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
    """Has the kernel lay memory in huge pages, where it is; addresses and bytes stay.

    Agents of other processes that read it (`shm` of memory outside a `Pool`) are the faster for it:
    the kernel looks up and holds one page where it did 512. Pages that nobody has touched stay so, and
    are huge when somebody does. To be called once, before or after `Agent.register`; before it where agents
    have NICs (`verbs`), since pages that a device has pinned stay as they are. Others may read and write the
    memory meanwhile.

    Parameters
    ----------
    memory
        What `Agent.register` takes: tensors, arrays, or lists, tuples or dicts of them, on the CPU.

    Returns
    -------
    int
        Bytes that lie in huge pages now. Less than all of it at both ends, which share their pages with
        others; in pages untouched; where memory is fragmented. 0 where the machine's administrator has
        switched transparent huge pages off, or the kernel is older than 6.1.

    Raises
    ------
    UsageError
        Read-only or device memory.

    Notes
    -----
    What is in small pages is copied once: 0.3 to 2 s for a GiB on the machine of the README's figures.
    numpy asks for huge pages for large arrays itself; torch does not.
    """
    views = [view(tensor) for tensor in flatten(memory)]
    if any(seen.gpu is not None for seen in views):
        raise UsageError(
            "this memory lies on a GPU, whose pages are its driver's: pass memory of the host",
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
        # A hint for pages to come. What it returns does not matter: the kernel may know no such hint.
        madvise(begin, end - begin, mmap.MADV_HUGEPAGE)
        # One at a time: the kernel tells of many only whether it failed with the last.
        collapsed += sum(
            page_nbytes
            for address in range(begin, end, page_nbytes)
            if madvise(address, page_nbytes, _COLLAPSE) == 0
        )
    return collapsed


def _read(setting: str) -> str:
    """Returns what a setting says; "" where this kernel has none."""
    try:
        return (_SETTINGS / setting).read_text()
    except OSError:
        return ""
