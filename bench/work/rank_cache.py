"""One rank's cache in a benchmark: memory, its layout, and the same bytes as numpy arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import kvxfer
from kvxfer.bench.work.layout_names import LISTED, ORDERS, NamedLayout
from kvxfer.bench.work.models import ModelShape
from kvxfer.bench.work.numbers import STAND_INS
from kvxfer.layout.quantization import Quantization
from kvxfer.layout.slices import heads_of, layers_of

# Tensors that were allocated one by one: they begin at pages of memory and are not evenly apart.
_PAGE_NBYTES: Final = 4096
_SCALES_ALIGNMENT: Final = 64
#: A static scale, by dtype: what numbers of 17 or so need.
_SCALES: Final = {"float8_e4m3fn": 0.05, "float8_e5m2": 0.05, "int8": 0.15}


def scale_of(dtype: str, *indices: Any) -> NDArray[np.float32]:
    """Returns the scale of a layer, a head or a page: four that repeat, whatever their number."""
    step = np.asarray(sum(indices, start=np.zeros(1, np.int64))) % 4
    return np.asarray(np.float32(_SCALES[dtype]) * (1 + np.float32(0.25) * step.astype(np.float32)))


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What one rank holds; layers and heads are numbered model-wide."""

    named: NamedLayout
    layers: range
    total_layers: int
    heads: range
    total_heads: int
    num_kv: int
    head_dim: int
    num_blocks: int

    @classmethod
    def of(
        cls,
        named: NamedLayout,
        shape: ModelShape,
        num_layers: int,
        tp_rank: int,
        pp_rank: int,
        num_blocks: int,
    ) -> RankSpec:
        """Returns one rank of a model of which `num_layers` layers are kept."""
        first_layer, held_layers = layers_of(num_layers, named.pp, pp_rank)
        first_head, held_heads = heads_of(shape.num_heads, named.tp, tp_rank)
        return cls(
            named,
            range(first_layer, first_layer + held_layers),
            num_layers,
            range(first_head, first_head + held_heads),
            shape.num_heads,
            shape.num_kv,
            shape.head_dim,
            num_blocks,
        )

    def without_scales(self, dtype: str) -> RankSpec:
        """Returns the same with other elements, which are the values themselves."""
        return replace(self, named=replace(self.named, dtype=dtype, scales=""))

    @property
    def itemsize(self) -> int:
        return STAND_INS[self.named.dtype].itemsize

    @property
    def page_nbytes(self) -> int:
        """Bytes of the keys, or the values, of one block in one layer."""
        return self.named.block_tokens * len(self.heads) * self.head_dim * self.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that `RankCache` wants."""
        offsets, each = self._tensors()
        end = offsets[-1] + each
        return self._scales_offset(end) + 4 * math.prod(self._scales_shape()) if self._scales_shape() else end

    def _axes(self) -> str:
        axes = ORDERS[self.named.order]
        # A latent cache has one vector, and no values.
        return axes if self.num_kv == 2 else axes.replace("2", "").replace("c", "d")

    def _shape(self) -> tuple[int, ...]:
        sizes = {
            "l": len(self.layers),
            "2": self.num_kv,
            "b": self.num_blocks,
            "t": self.named.block_tokens,
            "h": len(self.heads),
            "d": self.head_dim,
            "c": self.num_kv * self.head_dim,
        }
        return tuple(sizes[letter] for letter in self._axes())

    def _tensors(self) -> tuple[list[int], int]:
        """Returns where each tensor begins, and the bytes of one."""
        each = math.prod(self._shape()) * self.itemsize
        if self.named.order not in LISTED:
            return [0], each
        count = len(self.layers) * (self.num_kv if self.named.order == "apart" else 1)
        # No two neighbours are as far apart as the next two.
        pitch = (-(-each // _PAGE_NBYTES) + 4) * _PAGE_NBYTES
        return [number * pitch + number * 7 % 5 * _PAGE_NBYTES for number in range(count)], each

    def _scales_shape(self) -> tuple[int, ...]:
        """Returns [layer, kv, block] or [layer, kv, block, head] where pages have scales; else ()."""
        shape = len(self.layers), self.num_kv, self.num_blocks
        return {"page": shape, "page_head": (*shape, len(self.heads))}.get(self.named.scales, ())

    @staticmethod
    def _scales_offset(elements_nbytes: int) -> int:
        return -(-elements_nbytes // _SCALES_ALIGNMENT) * _SCALES_ALIGNMENT

    def place(self, memory: NDArray[np.uint8]) -> RankCache:
        """Lays the cache over `memory`, which is not touched."""
        return RankCache(self, memory)


class RankCache:
    """A rank's cache over memory. ``layout`` is for the engine; `part` and `scales` are for numpy."""

    def __init__(self, spec: RankSpec, memory: NDArray[np.uint8]) -> None:
        self.spec = spec
        self.memory = memory[: spec.nbytes]
        offsets, each = spec._tensors()
        shape, element = spec._shape(), STAND_INS[spec.named.dtype]
        self._tensors = [memory[at : at + each].view(element).reshape(shape) for at in offsets]
        #: float32 [layer, kv, block] or [layer, kv, block, head] of page scales, else None
        self.scales: NDArray[np.float32] | None = None
        if scales_shape := spec._scales_shape():
            at = spec._scales_offset(offsets[-1] + each)
            flat = memory[at : at + 4 * math.prod(scales_shape)]
            self.scales = flat.view(np.float32).reshape(scales_shape)
        self.layout = self._read_layout()

    def part(self, layer: int, kv: int) -> NDArray[Any]:
        """Returns the elements of a layer (of this rank) and K or V, as a view [block, token, head, dim]."""
        spec, axes = self.spec, self.spec._axes()
        if spec.named.order == "apart":
            tensor = self._tensors[layer * spec.num_kv + kv]
        else:
            tensor = self._tensors[layer if spec.named.order == "split" else 0]
        index = tuple({"l": layer, "2": kv}.get(letter, slice(None)) for letter in axes)
        left = [letter for letter in axes if letter not in "l2"]
        tensor = tensor[index]
        if "c" in left:
            tensor = tensor[..., kv * spec.head_dim : (kv + 1) * spec.head_dim]
            left[-1] = "d"
        return tensor.transpose([left.index(letter) for letter in "bthd"])

    def static_scales(self, layer: int, kv: int) -> NDArray[np.float32] | None:
        """Returns one scale, or one for each head of this rank; None without, or where pages have them."""
        spec = self.spec
        if spec.named.scales == "tensor":
            return scale_of(spec.named.dtype)
        if spec.named.scales == "head":
            return scale_of(spec.named.dtype, spec.layers[layer], kv, np.array(spec.heads))
        return None

    def _read_layout(self) -> kvxfer.KVLayout:
        spec, axes = self.spec, self.spec._axes()
        quantization = None
        if spec.named.scales == "tensor":
            quantization = Quantization.per_tensor(float(scale_of(spec.named.dtype)[0]))
        elif spec.named.scales == "head":
            table = [
                [self.static_scales(layer, kv) for kv in range(spec.num_kv)]
                for layer in range(len(spec.layers))
            ]
            quantization = Quantization.per_head(np.array(table))
        paged: dict[str, Any] = {}
        if self.scales is not None:
            paged = {
                "scales": self.scales,
                "scale_axes": "l2bh" if spec.named.scales == "page_head" else "l2b",
            }
        held: dict[str, Any] = {
            "first_layer": spec.layers.start,
            "total_layers": spec.total_layers,
            "first_head": spec.heads.start,
            "total_heads": spec.total_heads,
            "quantization": quantization,
        }
        if spec.named.order not in LISTED:
            return kvxfer.KVLayout.from_tensor(
                self._tensors[0], axes, dtype=spec.named.dtype, **paged, **held
            )
        tensors: list[Any] = self._tensors
        if spec.named.order == "apart" and spec.num_kv == 2:
            tensors = list(zip(tensors[0::2], tensors[1::2], strict=True))
        return kvxfer.KVLayout.from_tensors(tensors, axes, dtype=spec.named.dtype, **paged, **held)
