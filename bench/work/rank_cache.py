"""One rank's cache in a benchmark: memory, its layout, and the same bytes as numpy arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import kvxfer
from kvxfer.bench.work.layout_names import NamedLayout
from kvxfer.bench.work.models import NUM_KV, ModelShape
from kvxfer.layout.quantization import Quantization
from kvxfer.layout.slices import heads_of

#: dtype -> integers of the same size, in which a cache keeps its elements here
STAND_INS: Final[dict[str, np.dtype[Any]]] = {
    "bfloat16": np.dtype(np.uint16),
    "float8_e4m3fn": np.dtype(np.uint8),
}
#: A static scale, by dtype: what numbers of 17 or so need.
SCALES: Final = {"float8_e4m3fn": np.float32(0.05)}


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What one rank holds: every layer, and heads that are numbered model-wide."""

    named: NamedLayout
    num_layers: int
    heads: range
    total_heads: int
    head_dim: int
    num_blocks: int
    #: What the elements are multiplied by; None where they are the values themselves.
    scale: np.float32 | None

    @classmethod
    def of(
        cls, named: NamedLayout, shape: ModelShape, num_layers: int, tp_rank: int, num_tokens: int
    ) -> RankSpec:
        """Returns one rank of a model of which `num_layers` layers are kept."""
        first_head, held_heads = heads_of(shape.num_heads, named.tp, tp_rank)
        heads = range(first_head, first_head + held_heads)
        num_blocks = -(-num_tokens // named.block_tokens)
        scale = SCALES.get(named.dtype)
        return cls(named, num_layers, heads, shape.num_heads, shape.head_dim, num_blocks, scale)

    def without_scales(self, dtype: str) -> RankSpec:
        """Returns the same with other elements, which are the values themselves."""
        return replace(self, named=replace(self.named, dtype=dtype), scale=None)

    @property
    def itemsize(self) -> int:
        return STAND_INS[self.named.dtype].itemsize

    @property
    def row_nbytes(self) -> int:
        """Bytes of one token in one layer, keys and values."""
        return NUM_KV * len(self.heads) * self.head_dim * self.itemsize

    @property
    def page_nbytes(self) -> int:
        """Bytes of the keys, or the values, of one block in one layer."""
        return self.named.block_tokens * self.row_nbytes // NUM_KV

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that `RankCache` wants."""
        return self.num_layers * NUM_KV * self.num_blocks * self.page_nbytes

    def place(self, memory: NDArray[np.uint8]) -> RankCache:
        """Lays the cache over `memory`, which is not touched."""
        return RankCache(self, memory)


class RankCache:
    """A rank's cache over memory. ``layout`` is for the engine; `part` is for numpy."""

    def __init__(self, spec: RankSpec, memory: NDArray[np.uint8]) -> None:
        self.spec = spec
        self.memory = memory[: spec.nbytes]
        sizes = {
            "l": spec.num_layers,
            "2": NUM_KV,
            "b": spec.num_blocks,
            "t": spec.named.block_tokens,
            "h": len(spec.heads),
            "d": spec.head_dim,
        }
        shape = tuple(sizes[letter] for letter in spec.named.axes)
        assert math.prod(shape) * spec.itemsize == spec.nbytes
        self._tensor = self.memory.view(STAND_INS[spec.named.dtype]).reshape(shape)
        self.layout = kvxfer.KVLayout.from_tensor(
            self._tensor,
            spec.named.axes,
            dtype=spec.named.dtype,
            first_layer=0,
            total_layers=spec.num_layers,
            first_head=spec.heads.start,
            total_heads=spec.total_heads,
            quantization=None if spec.scale is None else Quantization.per_tensor(float(spec.scale)),
        )

    def part(self, layer: int, kv: int) -> NDArray[Any]:
        """Returns the elements of a layer and K or V, as a view [block, token, head, dim]."""
        left = self.spec.named.axes.removeprefix("l2")
        part: NDArray[Any] = self._tensor[layer, kv]
        return part.transpose([left.index(letter) for letter in "bthd"])
