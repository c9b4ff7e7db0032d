"""Page data that tells where it belongs: written at one end, checked to the last byte at the other.

Word ``i`` of a page with key ``k`` is ``k + ramp[i]`` (mod 2^64), where ``ramp`` is a fixed random sequence:
a page at another place, or shifted within itself, differs in practically every word.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Indices = NDArray[np.uint32]

# The check gathers pages in slices that stay in a core's second-level cache.
_SLICE_NBYTES = 256 << 10
# 2^64 / golden ratio, odd: splitmix64's increment.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: Words) -> Words:
    """Returns splitmix64's finaliser of each word: every input bit moves every output bit."""
    values = values.copy()
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def page_keys(*coordinates: int, num_pages: int) -> Words:
    """Returns one key for each page ``0 … num_pages - 1`` under ``coordinates`` (request, layer, …)."""
    key = np.zeros(1, dtype=np.uint64)
    for coordinate in coordinates:
        key = mix(key + np.array([coordinate + 1], dtype=np.uint64) * _GOLDEN)
    return mix(key + np.arange(1, num_pages + 1, dtype=np.uint64) * _GOLDEN)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first wrong byte that a check found."""

    page: int
    byte: int
    expected: int
    found: int

    def __str__(self) -> str:
        return f"byte {self.byte} of page {self.page} is {self.found:#04x}, expected {self.expected:#04x}"


class PageFiller:
    """Writes and checks pages of one size, a multiple of 8 bytes.

    ``pages`` is always ``uint64 [num_rows, page_words]``, a view of the cache; ``rows`` says which
    of them, in the order of ``keys``.
    """

    def __init__(self, page_nbytes: int) -> None:
        self._ramp = mix(np.arange(1, page_nbytes // 8 + 1, dtype=np.uint64))
        self._slice_rows = max(1, _SLICE_NBYTES // page_nbytes)
        self._gathered = np.empty((self._slice_rows, page_nbytes // 8), dtype=np.uint64)

    def fill(self, pages: Words, rows: Indices, keys: Words) -> None:
        """Writes the data of ``keys`` into ``rows``."""
        ramp = self._ramp
        # Row by row: one pass over memory where an indexed assignment needs two.
        for row, key in zip(rows.tolist(), keys, strict=True):
            np.add(ramp, key, out=pages[row])

    def check(self, pages: Words, rows: Indices, keys: Words) -> Mismatch | None:
        """Compares every byte; returns the first difference. Not for two threads at once."""
        for start in range(0, len(rows), self._slice_rows):
            taken = rows[start : start + self._slice_rows]
            gathered = self._gathered[: len(taken)]
            np.take(pages, taken, axis=0, out=gathered, mode="clip")
            gathered -= self._ramp
            wrong = gathered != keys[start : start + len(taken), None]
            if wrong.any():
                index = int(np.flatnonzero(wrong.any(axis=1))[0])
                return self._describe(start + index, pages[taken[index]], keys[start + index])
        return None

    def _describe(self, page: int, found: Words, key: np.uint64) -> Mismatch:
        expected_bytes = (self._ramp + key).view(np.uint8)
        found_bytes = found.view(np.uint8)
        byte = int(np.flatnonzero(expected_bytes != found_bytes)[0])
        return Mismatch(page, byte, int(expected_bytes[byte]), int(found_bytes[byte]))


def block_order(num_blocks: int, seed: int) -> Indices:
    """Returns all blocks ``0 … num_blocks - 1`` once, in a random order in which they are named."""
    return np.random.default_rng(seed).permutation(num_blocks).astype(np.uint32)
