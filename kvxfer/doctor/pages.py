"""The pages that a doctor lets others read: their geometry, and the value of every word.

Both ends know the words, so a reader checks every byte without further messages.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Indices = NDArray[np.uint32]

#: The region's name stands for the geometry and the words of this version; another version has another name.
REGION: Final = "kvxfer-doctor-pages-1"
#: 64 MiB in pages of 32 KiB: larger than a core's caches, small for a host.
NUM_PAGES: Final = 2048
PAGE_NBYTES: Final = 32 << 10
TOTAL_NBYTES: Final = NUM_PAGES * PAGE_NBYTES

#: One block so small that reading it costs only the round trip.
PING_REGION: Final = "kvxfer-doctor-ping-1"
PING_NBYTES: Final = 64

# 2^64 / golden ratio, odd: consecutive multiples differ in all their bytes.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_PAGE_WORDS = PAGE_NBYTES // 8
# What a word adds to its page's first one, uint64 [words].
_RAMP = np.arange(_PAGE_WORDS, dtype=np.uint64) * _GOLDEN
# 8 x 32 KiB: a slice of the check stays in a core's second-level cache.
_SLICE_PAGES = 8


def fill(pages: NDArray[Any]) -> None:
    """Writes the words of every page; ``pages`` is uint8 [NUM_PAGES, PAGE_NBYTES]."""
    ids = np.arange(NUM_PAGES, dtype=np.uint32)
    words = pages.view(np.uint64)
    for first in range(0, NUM_PAGES, _SLICE_PAGES):
        part = slice(first, first + _SLICE_PAGES)
        words[part] = _words_of(ids[part])


def count_wrong(pages: NDArray[Any], src_blocks: Indices, dst_blocks: Indices) -> int:
    """Returns how many of ``dst_blocks`` differ in any byte from the ``src_blocks`` that they copy."""
    words = pages.view(np.uint64)
    wrong = 0
    for first in range(0, len(src_blocks), _SLICE_PAGES):
        part = slice(first, first + _SLICE_PAGES)
        wrong += int((words[dst_blocks[part]] != _words_of(src_blocks[part])).any(axis=1).sum())
    return wrong


def _words_of(blocks: Indices) -> Words:
    """Returns uint64 [len(blocks), words]: each word's position in all pages, from 1, times `_GOLDEN`."""
    first = (blocks.astype(np.uint64) * np.uint64(_PAGE_WORDS) + np.uint64(1)) * _GOLDEN
    return first[:, None] + _RAMP
