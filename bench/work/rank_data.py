"""What the ranks of a benchmark hold: each element follows from its place in the model and sequence.

The destination's bytes are compared with what numpy finds in its own arrays, indexed by layer, K or V,
block, token, head and dim; no stride, run or program of the engine takes part.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.bench.work.layout_names import NamedLayout
from kvxfer.bench.work.numbers import LARGEST, narrow, widen
from kvxfer.bench.work.page_data import Indices
from kvxfer.bench.work.rank_cache import RankCache, scale_of

_NUM_CODES = 1 << 16
# Of the values: what attention sees, and within reach of every dtype with the scales used here.
_DEVIATION = 4.0


class RankData:
    """Fills and checks caches that hold the same sequence of `num_tokens` tokens.

    Parameters
    ----------
    src
        How the elements were stored first: it says which numbers there are.
    num_heads
        Of the model.
    """

    def __init__(self, src: NamedLayout, num_heads: int, head_dim: int, num_tokens: int, seed: int) -> None:
        self._src = src
        self._num_tokens = num_tokens
        self._seed = seed
        random = np.random.default_rng(seed)
        # An element is one of 2^16 numbers, by the sum of what its token and its place in it drew.
        self._rows = random.integers(0, _NUM_CODES, (num_heads, head_dim), np.uint16)
        values = random.standard_normal(_NUM_CODES).astype(np.float32) * np.float32(_DEVIATION)
        if src.scales:
            values /= scale_of(src.dtype)
        self._stored: NDArray[Any] = narrow(values, src.dtype)
        self._numbers = widen(self._stored, src.dtype)

    def as_bytes(self) -> RankData:
        """Returns the same stored elements taken for the values themselves: nothing is to become of them."""
        other = copy(self)
        other._src = replace(self._src, scales="")
        return other

    def fill(self, cache: RankCache, blocks: Indices) -> None:
        """Writes the whole sequence into `blocks`, and the scales of its pages."""
        for layer, number in enumerate(cache.spec.layers):
            for kv in range(cache.spec.num_kv):
                part = cache.part(layer, kv)
                part[blocks] = self._stored[self._codes(number, kv, cache.spec.heads)].reshape(
                    -1, *part.shape[1:]
                )
                if cache.scales is not None:
                    cache.scales[layer, kv, blocks] = self._page_scales(cache, number, kv)

    def check(
        self, cache: RankCache, blocks: Indices, layers: range | None = None, num_tokens: int | None = None
    ) -> str:
        """Compares every element of `layers` (model-wide), and the scales; returns the first that is wrong.

        Parameters
        ----------
        layers
            None: all that the cache holds.
        num_tokens
            How many tokens, from the first on; None: all.
        """
        spec = cache.spec
        count = self._num_tokens if num_tokens is None else num_tokens
        for number in spec.layers if layers is None else layers:
            layer = number - spec.layers.start
            for kv in range(spec.num_kv):
                expected, scales = self._expected(cache, number, kv)
                where = f"layer {number}, {'kv'[kv]}"
                found = cache.part(layer, kv)[blocks].reshape(expected.shape)[:count]
                wrong = found != expected[:count]
                if wrong.any():
                    token, head, dim = (int(index) for index in np.argwhere(wrong)[0])
                    return (
                        f"{where}, token {token}, head {spec.heads[head]}, dim {dim} is "
                        f"{found[token, head, dim]:#x}, expected {expected[token, head, dim]:#x} "
                        f"({int(wrong.sum())} of {wrong.size} elements are wrong)"
                    )
                if scales is not None and num_tokens is None:
                    assert cache.scales is not None
                    stored = cache.scales[layer, kv, blocks]
                    if (stored != scales).any():
                        page = int(np.argwhere(stored != scales)[0][0])
                        return f"{where}: the scale of page {page} is {stored[page]}, expected {scales[page]}"
        return ""

    # ---- what there should be ---------------------------------------------------------------------

    def _codes(self, layer: int, kv: int, heads: range) -> NDArray[np.uint16]:
        """Returns which of the numbers each element is, [token, head, dim]."""
        random = np.random.default_rng((self._seed, layer, kv))
        tokens = random.integers(0, _NUM_CODES, self._num_tokens, np.uint16)
        codes: NDArray[np.uint16] = tokens[:, None, None] + self._rows[heads.start : heads.stop]
        return codes

    def _page_scales(self, cache: RankCache, layer: int, kv: int) -> NDArray[np.float32]:
        """Returns the scales of the sequence's pages, [page] or [page, head], that a source has."""
        named = cache.spec.named
        pages = np.arange(self._num_tokens // named.block_tokens)
        if named.scales == "page":
            return scale_of(named.dtype, pages, layer, kv)
        return scale_of(named.dtype, pages[:, None], layer, kv, np.array(cache.spec.heads))

    def _source_scales(self, cache: RankCache, layer: int, kv: int) -> NDArray[np.float32]:
        """Returns what the source's elements are multiplied by, [1 or token, 1 or head]."""
        src, heads = self._src, np.array(cache.spec.heads)
        if src.scales == "head":
            return scale_of(src.dtype, layer, kv, heads)[None, :]
        if src.scales in ("page", "page_head"):
            pages = np.arange(self._num_tokens)[:, None] // src.block_tokens
            inner = (heads,) if src.scales == "page_head" else ()
            return scale_of(src.dtype, pages, layer, kv, *inner)
        return scale_of(src.dtype)[None, :] if src.scales else np.ones((1, 1), np.float32)

    def _expected(
        self, cache: RankCache, layer: int, kv: int
    ) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
        """Returns the elements [token, head, dim] and the scales of pages, where there are any."""
        spec, src, dst = cache.spec, self._src, cache.spec.named
        codes = self._codes(layer, kv, spec.heads)
        src_scales = self._source_scales(cache, layer, kv)
        if src.dtype == dst.dtype and src.scales == dst.scales:
            return self._stored[codes], self._kept_scales(cache, src_scales)
        static = cache.static_scales(layer - spec.layers.start, kv)
        if src_scales.size == 1 and cache.scales is None and (static is None or static.size == 1):
            # Equal numbers become equal elements, so each is converted once.
            numbers = self._numbers * src_scales[0] if src.scales else self._numbers
            return narrow(numbers / static if static is not None else numbers, dst.dtype)[codes], None
        numbers = self._numbers[codes]
        if src.scales:
            numbers *= src_scales[:, :, None]
        if cache.scales is None:
            return narrow(numbers / static[:, None] if static is not None else numbers, dst.dtype), None
        # One scale for all that share it: their largest number becomes the dtype's largest.
        pages = np.abs(numbers).reshape(-1, dst.block_tokens, len(spec.heads), spec.head_dim)
        largest = pages.max(axis=(1, 3) if dst.scales == "page_head" else (1, 2, 3))
        scales = np.where(largest > 0, largest / np.float32(LARGEST[dst.dtype]), np.float32(1))
        per_token = np.repeat(scales, dst.block_tokens, axis=0).reshape(self._num_tokens, -1, 1)
        return narrow(numbers / per_token, dst.dtype), scales

    def _kept_scales(self, cache: RankCache, per_token: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """Returns the scales of the destination's pages where those of the source go along."""
        if cache.scales is None:
            return None
        scales = per_token[:: cache.spec.named.block_tokens]
        return scales if cache.spec.named.scales == "page_head" else scales[:, 0]
