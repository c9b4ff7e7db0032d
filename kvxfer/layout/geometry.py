"""The numbers of a layout, and the bytes that they span. What each means, `KVLayout` says."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvxfer.layout.quantization import SCALE_NBYTES, Quantization


@dataclass(frozen=True, slots=True)
class Geometry:
    """The fields of a `KVLayout`, unchecked."""

    dtype: str
    itemsize: int
    num_blocks: int
    block_tokens: int
    num_kv: int
    head_dim: int
    first_layer: int
    num_layers: int
    total_layers: int
    first_head: int
    num_heads: int
    total_heads: int
    block_stride: int
    token_stride: int
    head_stride: int
    dim_stride: int
    offset: int = 0
    layer_stride: int = 0
    kv_stride: int = 0
    offsets: tuple[int, ...] = ()
    quantization: Quantization | None = None
    null_block: int = -1
    cp_rank: int = 0
    cp_size: int = 1
    cp_interleave: int = 1
    model: str = ""
    group: str = ""


def block_axes(layout: Geometry) -> list[tuple[str, int, int]]:
    """Returns (name, count, stride) of the axes that repeat within one (layer, kv)."""
    return [
        ("block", layout.num_blocks, layout.block_stride),
        ("token", layout.block_tokens, layout.token_stride),
        ("head", layout.num_heads, layout.head_stride),
        ("dim", layout.head_dim, layout.dim_stride),
    ]


def scale_axes(layout: Geometry) -> list[tuple[str, int, int]]:
    """Returns (name, count, stride) of the axes of page scales; [] when there are none."""
    scales = layout.quantization
    if scales is None or not scales.in_memory:
        return []
    return [
        ("layer", layout.num_layers, scales.layer_stride),
        ("kv", layout.num_kv, scales.kv_stride),
        ("block", layout.num_blocks, scales.block_stride),
        ("head", layout.num_heads if scales.per == "page_head" else 1, scales.head_stride),
    ]


def extent(nbytes: int, axes: list[tuple[str, int, int]]) -> int:
    """Returns the bytes from the first to the end of the last element of `nbytes`."""
    return nbytes + sum((count - 1) * stride for _, count, stride in axes)


def layer_axes(layout: Geometry) -> list[tuple[str, int, int]]:
    """Returns (name, count, stride) of layers and kv; [] when each has an offset of its own."""
    if layout.offsets:
        return []
    return [("layer", layout.num_layers, layout.layer_stride), ("kv", layout.num_kv, layout.kv_stride)]


def offsets_of_layers(layout: Geometry) -> NDArray[np.int64]:
    """Returns the offset of block 0 of each (layer of this rank, kv), [num_layers, num_kv]."""
    if layout.offsets:
        return np.array(layout.offsets, np.int64).reshape(layout.num_layers, layout.num_kv)
    layers = np.arange(layout.num_layers, dtype=np.int64) * layout.layer_stride
    kvs = np.arange(layout.num_kv, dtype=np.int64) * layout.kv_stride
    return layout.offset + layers[:, None] + kvs[None, :]


def end_of_elements(layout: Geometry) -> int:
    """Returns the bytes from the region's base to the end of the last element."""
    return int(offsets_of_layers(layout).max()) + extent(layout.itemsize, block_axes(layout))


def end(layout: Geometry) -> int:
    """Returns the bytes from the region's base to the end of the last element or page scale."""
    elements, axes = end_of_elements(layout), scale_axes(layout)
    if layout.quantization is None or not axes:
        return elements
    return max(elements, layout.quantization.offset + extent(SCALE_NBYTES, axes))
