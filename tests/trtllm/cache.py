"""The engine's memory: one rank's buffers, and the bytes that a model would have computed into them.

The bytes of a token follow from it and from all tokens before it, so a block that comes from another prompt,
another layer or another head is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tests.trtllm import fake_engine
from tests.trtllm.fake_engine import KvCacheBufferRef, KvCacheLayerGroupLayout, KvCacheLayout, KvCacheRegion

BLOCK_SIZE: Final = 4
NUM_LAYERS: Final = 3
NUM_HEADS: Final = 4
HEAD_NBYTES: Final = 2
LATENT_NBYTES: Final = 8
WINDOW: Final = 10

_MASK: Final = (1 << 64) - 1
_SPREAD: Final = np.array(
    [(0x9E3779B97F4A7C15 * (2 * at + 1)) & _MASK for at in range(LATENT_NBYTES)], np.uint64
)


@dataclass(frozen=True)
class Options:
    """One engine.

    Attributes
    ----------
    settings
        ``KVXFER_TRTLLM``.
    release
        `tests.trtllm.contract.RELEASES`.
    kind
        ``"tensor"``: one pool; ``"latent"``: the same of MLA; ``"layout"``: layer groups, one with a window.
    chunk_tokens
        The most tokens of a prompt that an iteration computes.
    """

    settings: dict[str, Any]
    release: str = "older"
    kind: str = "tensor"
    tp_size: int = 1
    num_blocks: int = 64
    chunk_tokens: int = 1 << 20


def prefix_hashes(tokens: list[int], salt: str | None) -> list[int]:
    """Returns for each token a hash of it and all tokens before it."""
    state = int.from_bytes((salt or "").encode()[:8].ljust(8)) | 1
    found = []
    for token in tokens:
        state = ((state ^ (token + 1)) * 0x2545F4914F6CDD1D + 1) & _MASK
        found.append(state)
    return found


def sampled(hashes: list[int]) -> int:
    """Returns the token that follows."""
    return (hashes[-1] >> 20) % 50_000


def content(hashes: list[int], layer: int, kv: int, head: int, nbytes: int) -> NDArray[np.uint8]:
    """Returns what a model would have computed for one head: [token, byte]."""
    own = np.uint64(((layer * 2 + kv) * 64 + head) * 0x9E37 + 1)
    mixed = (np.array(hashes, np.uint64) ^ own)[:, None] * _SPREAD[:nbytes]
    return (mixed >> np.uint64(56)).astype(np.uint8)


class Blocks:
    """The free blocks of a layer group, which are the same on all ranks."""

    def __init__(self, num_blocks: int, window: int | None) -> None:
        self.num_blocks, self.window = num_blocks, window
        self.free = list(range(num_blocks))  # the first request has block 0

    def take(self, num_tokens: int) -> list[int]:
        count = -(-num_tokens // BLOCK_SIZE)
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give_back(self, blocks: list[int]) -> None:
        again = [block for block in blocks if block >= 0]
        assert not set(again) & set(self.free), "a block was given back twice"
        self.free += again

    def first_kept(self, position: int) -> int:
        """Returns the first block of a table that the token at `position` or a later one sees."""
        return 0 if self.window is None else max(position - self.window + 1, 0) // BLOCK_SIZE


def blocks_of(options: Options) -> list[Blocks]:
    """Returns the free blocks of each layer group."""
    if options.kind != "layout":
        return [Blocks(options.num_blocks, None)]
    return [Blocks(options.num_blocks, None), Blocks(options.num_blocks // 2, WINDOW)]


class Cache:
    """A rank's memory, and how the engine describes it to its connector.

    Attributes
    ----------
    groups
        For each layer group its layers' kv arrays, [block, token, head, byte].
    """

    def __init__(self, options: Options, rank: int) -> None:
        is_latent = options.kind == "latent"
        held = 1 if is_latent else NUM_HEADS // options.tp_size
        self._rank = rank
        self._heads = range(1) if is_latent else range(rank * held, (rank + 1) * held)
        self._head_nbytes = LATENT_NBYTES if is_latent else HEAD_NBYTES
        self.groups: list[dict[int, list[NDArray[np.uint8]]]] = []
        self.tensor: NDArray[np.uint8] | None = None
        self.layout: KvCacheLayout | None = None
        if options.kind == "layout":
            self._lay_out(blocks_of(options))
            return
        page = held, BLOCK_SIZE, self._head_nbytes
        kv_factor = 1 if is_latent else 2
        self.tensor = np.full((options.num_blocks, NUM_LAYERS, kv_factor, math.prod(page)), 0xEE, np.uint8)
        pages = self.tensor.reshape(*self.tensor.shape[:3], *page).swapaxes(3, 4)
        self.groups = [
            {layer: [pages[:, layer, kv] for kv in range(kv_factor)] for layer in range(NUM_LAYERS)}
        ]

    def _lay_out(self, blocks: list[Blocks]) -> None:
        """Layers 0 and 1 see all tokens, and layer 2 a window; each group's keys and values are separate."""
        described = []
        page = BLOCK_SIZE, len(self._heads), self._head_nbytes
        nbytes = math.prod(page)
        for at, (layers, own) in enumerate(zip(((0, 1), (2,)), blocks, strict=True)):
            views: dict[int, list[NDArray[np.uint8]]] = {layer: [] for layer in layers}
            size, regions = len(layers) * nbytes, []
            for role in ("key", "value"):
                stride = size + 32  # another buffer lies between
                pool = np.full(own.num_blocks * stride, 0xEE, np.uint8)
                fake_engine.POOLS[pool.ctypes.data] = pool
                buffers = tuple(KvCacheBufferRef(layer, role) for layer in layers)
                regions.append(KvCacheRegion(pool.ctypes.data, size, stride, own.num_blocks, buffers))
                pages = pool.reshape(own.num_blocks, stride)[:, :size].reshape(-1, len(layers), *page)
                for index, layer in enumerate(layers):
                    views[layer].append(pages[:, index])
            self.groups.append(views)
            described.append(KvCacheLayerGroupLayout(at, layers, own.window, tuple(regions)))
        self.layout = KvCacheLayout(BLOCK_SIZE, tuple(described))

    def compute(
        self, tables: list[list[int]], windows: list[int | None], layer: int, hashes: list[int], first: int
    ) -> None:
        """Writes a layer of the tokens from `first` on; checks all before them that they attend to."""
        at = next(at for at, views in enumerate(self.groups) if layer in views)
        window = windows[at]
        seen = 0 if window is None else max(first - window + 1, 0)
        for kv, array in enumerate(self.groups[at][layer]):
            expected = np.stack(
                [content(hashes, layer, kv, head, self._head_nbytes) for head in self._heads], 1
            )
            for block, within, tokens in _places(tables[at], seen, first):
                assert np.array_equal(array[block, within], expected[tokens]), (
                    f"layer {layer}, kv {kv}, block {block}: tokens {tokens} of rank {self._rank} are not "
                    "what was computed"
                )
            for block, within, tokens in _places(tables[at], first, len(hashes)):
                array[block, within] = expected[tokens]

    def clear(self, tables: list[list[int]]) -> None:
        """Overwrites blocks that no request has any more."""
        for views, table in zip(self.groups, tables, strict=True):
            for arrays in views.values():
                for array in arrays:
                    array[[block for block in table if block >= 0]] = 0xDD


def _places(table: list[int], first: int, stop: int) -> Iterator[tuple[int, slice, slice]]:
    while first < stop:
        end = min((first // BLOCK_SIZE + 1) * BLOCK_SIZE, stop)
        block = table[first // BLOCK_SIZE]
        assert block >= 0, f"token {first} has no block"
        within = first % BLOCK_SIZE
        yield block, slice(within, within + end - first), slice(first, end)
        first = end
