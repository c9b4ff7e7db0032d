"""Page data that tells where it belongs; what kvxfer's own benchmark does, without kvxfer.

Word ``i`` of the ``n``-th named page is ``key(iteration, n) + ramp[i]`` (mod 2^64): a page at the
wrong place, of another iteration, or shifted within itself differs in practically every word.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# The check gathers pages in slices that stay in a core's second-level cache.
_SLICE_NBYTES = 256 << 10


class PageData:
    """Writes and checks the pages of one memory, ``uint8 [num_pages * page_nbytes]``."""

    def __init__(self, memory: Any, page_nbytes: int) -> None:
        self._pages = memory.view(np.uint64).reshape(-1, page_nbytes // 8)
        self._ramp = np.random.default_rng(7).integers(0, 1 << 63, page_nbytes // 8, np.uint64)
        self._slice_pages = max(1, _SLICE_NBYTES // page_nbytes)

    def fill(self, order: Any, iteration: int) -> None:
        """Writes the data of an iteration into the pages, in their order."""
        for page, key in zip(order.tolist(), _keys(iteration, len(order)), strict=True):
            np.add(self._ramp, key, out=self._pages[page])

    def check(self, order: Any, iteration: int) -> str:
        """Compares every byte; returns what is wrong first, or nothing."""
        keys = _keys(iteration, len(order))
        for start in range(0, len(order), self._slice_pages):
            rows = order[start : start + self._slice_pages]
            found = self._pages[rows]
            expected = self._ramp[None, :] + keys[start : start + len(rows), None]
            if np.array_equal(found, expected):
                continue
            index = int(np.flatnonzero((found != expected).any(axis=1))[0])
            is_, should = found[index].view(np.uint8), expected[index].view(np.uint8)
            byte = int(np.flatnonzero(is_ != should)[0])
            return f"byte {byte} of page {start + index} is {is_[byte]:#04x}, expected {should[byte]:#04x}"
        return ""


def page_order(pattern: str, num_pages: int, seed: int, run_pages: int = 16) -> Any:
    """Returns all pages once, ``int32``, in the order in which they are named."""
    random = np.random.default_rng(seed)
    if pattern == "contiguous":
        order = np.arange(num_pages)
    elif pattern == "runs":
        starts = random.permutation(-(-num_pages // run_pages)) * run_pages
        order = (starts[:, None] + np.arange(run_pages)[None, :]).reshape(-1)
        order = order[order < num_pages]
    else:
        order = random.permutation(num_pages)
    return order.astype(np.int32)


def _keys(iteration: int, num_pages: int) -> Any:
    return np.random.default_rng([11, iteration]).integers(0, 1 << 63, num_pages, np.uint64)
