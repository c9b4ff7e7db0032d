"""What the ranks of a benchmark hold: each element follows from its place in the model and sequence.

It is compared with what numpy finds in its own arrays; no stride, run or program of the engine takes part.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.bench.work.models import NUM_KV
from kvxfer.bench.work.page_data import Indices
from kvxfer.bench.work.rank_cache import SCALES, STAND_INS, RankCache

_NUM_CODES = 1 << 16
# Of the values: what attention sees, and within reach of every dtype with the scales used here.
_DEVIATION = 4.0


class RankData:
    """Fills and checks caches that hold the same sequence of `num_tokens` tokens.

    ``dtype`` is of the elements as they were stored first: it says which numbers there are; ``num_heads`` is
    of the model.
    """

    def __init__(self, dtype: str, num_heads: int, head_dim: int, num_tokens: int, seed: int) -> None:
        self._dtype = dtype
        self._scale = SCALES.get(dtype)
        self._num_tokens = num_tokens
        self._seed = seed
        random = np.random.default_rng(seed)
        # An element is one of 2^16 numbers, by the sum of what its token and its place in it drew.
        self._rows = random.integers(0, _NUM_CODES, (num_heads, head_dim), np.uint16)
        values = random.standard_normal(_NUM_CODES).astype(np.float32) * np.float32(_DEVIATION)
        self._stored: NDArray[Any] = narrow(values if self._scale is None else values / self._scale, dtype)

    def as_bytes(self) -> RankData:
        """Returns the same stored elements taken for the values themselves: nothing is to become of them."""
        other = copy(self)
        other._scale = None
        return other

    def fill(self, cache: RankCache, blocks: Indices) -> None:
        """Writes the whole sequence into `blocks`."""
        for layer in range(cache.spec.num_layers):
            for kv in range(NUM_KV):
                part = cache.part(layer, kv)
                codes = self._codes(layer, kv, cache.spec.heads)
                part[blocks] = self._stored[codes].reshape(-1, *part.shape[1:])

    def check(
        self, cache: RankCache, blocks: Indices, layers: range | None = None, num_tokens: int | None = None
    ) -> str:
        """Compares every element of `layers` (all), and of the first `num_tokens` tokens (all).

        Returns the first that is wrong, in words.
        """
        spec = cache.spec
        elements = self._elements(cache)
        for layer in range(spec.num_layers) if layers is None else layers:
            for kv in range(NUM_KV):
                expected = elements[self._codes(layer, kv, spec.heads)]
                found = cache.part(layer, kv)[blocks].reshape(expected.shape)[:num_tokens]
                wrong = found != expected[:num_tokens]
                if wrong.any():
                    token, head, dim = (int(index) for index in np.argwhere(wrong)[0])
                    return (
                        f"layer {layer}, {'kv'[kv]}, token {token}, head {spec.heads[head]}, dim {dim} is "
                        f"{found[token, head, dim]:#x}, expected {expected[token, head, dim]:#x} "
                        f"({int(wrong.sum())} of {wrong.size} elements are wrong)"
                    )
        return ""

    def _codes(self, layer: int, kv: int, heads: range) -> NDArray[np.uint16]:
        """Returns which of the numbers each element is, [token, head, dim]."""
        random = np.random.default_rng((self._seed, layer, kv))
        tokens = random.integers(0, _NUM_CODES, self._num_tokens, np.uint16)
        codes: NDArray[np.uint16] = tokens[:, None, None] + self._rows[heads.start : heads.stop]
        return codes

    def _elements(self, cache: RankCache) -> NDArray[Any]:
        """Returns what each of the numbers is to be in a cache: equal numbers become equal elements."""
        dtype, scale = cache.spec.named.dtype, cache.spec.scale
        if dtype == self._dtype and scale == self._scale:
            return self._stored
        values = widen(self._stored, self._dtype)
        if self._scale is not None:
            values = values * self._scale
        return narrow(values if scale is None else values / scale, dtype)


def widen(codes: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Returns the numbers of stand-in integers as float32, which is exact."""
    return codes.view(_type(dtype)).astype(np.float32)


def narrow(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Returns the stand-in integers of float32 numbers, rounded to nearest, ties to even."""
    return np.asarray(values.astype(_type(dtype)).view(STAND_INS[dtype]))


def _type(dtype: str) -> np.dtype[Any]:
    import ml_dtypes

    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype))
    return found
