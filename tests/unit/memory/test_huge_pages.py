"""use_huge_pages: the kernel reports memory of small pages as huge pages, with the same content."""

from __future__ import annotations

import mmap
import os
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import kvxfer

SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
RELEASE = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
needs_kernel = pytest.mark.skipif(
    RELEASE < (6, 1)
    or not (SETTINGS / "enabled").exists()
    or "[never]" in (SETTINGS / "enabled").read_text(),
    reason="this kernel has no MADV_COLLAPSE, or no transparent huge pages",
)

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def page_nbytes() -> int:
    return int((SETTINGS / "hpage_pmd_size").read_text())


def in_small_pages(count: int) -> Bytes:
    """Returns an array of some huge pages and a bit more, in its own mapping as large tensors are."""
    pages = mmap.mmap(-1, (count + 1) * page_nbytes(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    array = np.frombuffer(pages, np.uint8)
    start = -array.ctypes.data % page_nbytes()
    return array[start : start + count * page_nbytes() + 100]


def counter(array: Bytes, name: str) -> int:
    """Returns what the kernel counts, in bytes, of the mapping in which an array lies."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if area := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(area[1], 16) <= array.ctypes.data < int(area[2], 16)
        elif inside and line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{name} of this memory is not in smaps")


@needs_kernel
def test_what_is_in_small_pages_is_collapsed(seed: int) -> None:
    memory = in_small_pages(4)
    memory[:] = np.random.default_rng(seed).integers(0, 256, len(memory), np.uint8)
    before = memory.copy()
    assert counter(memory, "AnonHugePages") == 0
    assert kvxfer.use_huge_pages(memory) == 4 * page_nbytes()
    assert counter(memory, "AnonHugePages") == 4 * page_nbytes()
    assert (memory == before).all()
    assert kvxfer.use_huge_pages(memory) == 4 * page_nbytes()


@needs_kernel
def test_what_nobody_has_touched_stays_so_and_is_huge_later() -> None:
    memory = in_small_pages(4)
    kept = counter(memory, "Rss")
    assert kvxfer.use_huge_pages(memory) == 0
    assert counter(memory, "Rss") == kept
    memory[:] = 1
    assert counter(memory, "AnonHugePages") == 4 * page_nbytes()


@needs_kernel
def test_who_writes_meanwhile_loses_nothing() -> None:
    deadline = time.monotonic() + 60
    while not written_meanwhile():  # on a busy machine the writer may not have come to it
        assert time.monotonic() < deadline


def written_meanwhile() -> bool:
    """Asks for huge pages under a thread that writes; returns whether it wrote meanwhile."""
    memory = in_small_pages(64)
    memory[:] = 0
    counts = memory[: 64 * page_nbytes()].view(np.uint64)[:: page_nbytes() // 64]
    began, stop = threading.Event(), threading.Event()
    rounds = 0

    def write() -> None:
        nonlocal rounds
        while not stop.is_set():
            counts[:] += 1
            rounds += 1
            began.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert began.wait(60)
        before = rounds
        assert kvxfer.use_huge_pages(memory) == 64 * page_nbytes()
        wrote = rounds > before
    finally:
        stop.set()
        writer.join()
    assert (counts == rounds).all()
    return wrote


def test_too_little_for_a_huge_page() -> None:
    assert kvxfer.use_huge_pages(np.ones(4096, np.uint8)) == 0


def test_memory_that_cannot_be_registered_is_refused() -> None:
    with pytest.raises(kvxfer.UsageError, match="read-only"):
        kvxfer.use_huge_pages(np.frombuffer(bytes(64), np.uint8))
