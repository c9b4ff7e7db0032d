"""A digest of what a page holds, and the layout of pages in the pool."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import numpy as np

from kvxfer.layout.kv_layout import KVLayout
from kvxfer.layout.quantization import SCALE_NBYTES, Quantization

#: A page begins at a cache line, so that two copies never write to the same line.
LINE_NBYTES: Final = 64
_VERSION: Final = 1
# Layouts whose digest is cached: each call that parks needs it, and computing it takes 0.1 ms.
_MOST_KEPT: Final = 64
_CONTENT: Final = (
    *("dtype", "itemsize", "block_tokens", "num_kv", "head_dim"),
    *("first_layer", "num_layers", "total_layers", "first_head", "num_heads", "total_heads"),
    *("cp_rank", "cp_size", "cp_interleave", "model", "group"),
)


def layout_digest(layout: KVLayout) -> str:
    """Returns the digest of one page's contents: 64 hexadecimal digits, the ``layout`` of the page's key.

    The daemon returns it to a caller that parks. An engine that only fetches computes it from its own layout.
    Two layouts have the same digest if their blocks hold the same elements: the same slice of layers, heads
    and context parallelism, tokens a block, dtype and scales. The number and the places of the blocks do not
    matter.
    """
    return _digest(layout)


@lru_cache(_MOST_KEPT)
def _digest(layout: KVLayout) -> str:
    content: dict[str, Any] = {name: getattr(layout, name) for name in _CONTENT}
    if (scales := layout.quantization) is not None:
        # The rule for values that are too large belongs to the conversion, not to the stored contents.
        content["quantization"] = [scales.per, *scales.scales]
    text = json.dumps([_VERSION, content], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@lru_cache(_MOST_KEPT)
def page_nbytes(layout: KVLayout, slab_nbytes: int = 0, alignment_nbytes: int = LINE_NBYTES) -> int:
    """Returns how many bytes of the pool one page of `layout` takes, including the gap before the next page.

    Pages of all slabs lie on one grid. A page that reaches over the end of a slab is lost, which matters if a
    slab has few, large pages. So the page is made larger until the slab's ends lie on the grid, if that costs
    the slab at most one page. Pages that are also kept in files need a larger `alignment_nbytes`.
    """
    unit = math.lcm(alignment_nbytes, layout.itemsize)
    least = pool_layout(layout, 2).block_stride
    if alignment_nbytes > LINE_NBYTES:
        least = -(-least // unit) * unit
    most = slab_nbytes // least
    for count in range(most, max(most - 2, 0), -1):
        if slab_nbytes % (count * unit) == 0:
            return slab_nbytes // count
    return least


def pool_layout(layout: KVLayout, num_blocks: int, nbytes: int = 0) -> KVLayout:
    """Returns the layout of pages of `layout` in the pool: one page after the other, each contiguous.

    Within a page the axes keep the order that they have in `layout`, so contiguous runs stay contiguous.
    Scales of a page follow its elements.

    Parameters
    ----------
    num_blocks
        How many pages there are.
    nbytes
        The bytes of each page, from `page_nbytes`; 0 for the least.
    """
    strides: dict[str, int] = {}
    used_nbytes = layout.itemsize
    for axis, count in _inner_axes(layout):
        strides[axis] = used_nbytes if count > 1 else 0
        used_nbytes *= count
    quantization = layout.quantization
    if quantization is not None and quantization.in_memory:
        quantization, used_nbytes = _scales_behind(layout, quantization, used_nbytes)
    block_stride = nbytes or -(-used_nbytes // LINE_NBYTES) * LINE_NBYTES
    if block_stride % layout.itemsize:  # e.g. elements of 3 bytes, which do not divide a cache line
        block_stride = -(-used_nbytes // layout.itemsize) * layout.itemsize
    block_stride = block_stride if num_blocks > 1 else 0
    if quantization is not None and quantization.in_memory:
        quantization = replace(quantization, block_stride=block_stride)
    return replace(
        layout,
        num_blocks=num_blocks,
        block_stride=block_stride,
        token_stride=strides["token"],
        head_stride=strides["head"],
        dim_stride=strides["dim"],
        layer_stride=strides["layer"],
        kv_stride=strides["kv"],
        offset=0,
        offsets=(),
        quantization=quantization,
        null_block=-1,
    )


def _inner_axes(layout: KVLayout) -> list[tuple[str, int]]:
    """Returns names and lengths of the axes within a page, the innermost first."""
    layer_stride, kv_stride = layout.layer_stride, layout.kv_stride
    if layout.offsets:
        # The layers were allocated one by one. Keys and values lie together or, within each layer, apart.
        begins = layout.layer_offsets()
        apart = np.unique(begins[:, -1] - begins[:, 0])
        layer_stride = 1 << 62
        kv_stride = int(apart[0]) if len(apart) == 1 and apart[0] > 0 else layer_stride - 1
    axes = [
        (layout.dim_stride, 0, "dim", layout.head_dim),
        (layout.head_stride, 1, "head", layout.num_heads),
        (layout.token_stride, 2, "token", layout.block_tokens),
        (kv_stride, 3, "kv", layout.num_kv),
        (layer_stride, 4, "layer", layout.num_layers),
    ]
    return [(name, count) for _, _, name, count in sorted(axes)]


def _scales_behind(layout: KVLayout, scales: Quantization, nbytes: int) -> tuple[Quantization, int]:
    """Returns the places of a page's scales behind its `nbytes` of elements, and the bytes of both."""
    offset = -(-nbytes // SCALE_NBYTES) * SCALE_NBYTES
    num_heads = layout.num_heads if scales.per == "page_head" else 1
    of_kv = num_heads * SCALE_NBYTES
    of_layer = layout.num_kv * of_kv
    placed = replace(
        scales,
        offset=offset,
        head_stride=SCALE_NBYTES if num_heads > 1 else 0,
        kv_stride=of_kv if layout.num_kv > 1 else 0,
        layer_stride=of_layer if layout.num_layers > 1 else 0,
    )
    return placed, offset + layout.num_layers * of_layer
