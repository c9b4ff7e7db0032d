"""What a page holds, as a digest, and how pages of one layout lie in the pool."""

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

# A page begins at a cache line, so that copies of one never touch another's.
_ALIGNMENT_NBYTES: Final = 64
_VERSION: Final = 1
# Layouts of which the answer is kept: each call that parks asks, and it takes 0.1 ms to find.
_MOST_KEPT: Final = 64
_CONTENT: Final = (
    *("dtype", "itemsize", "block_tokens", "num_kv", "head_dim"),
    *("first_layer", "num_layers", "total_layers", "first_head", "num_heads", "total_heads"),
    *("cp_rank", "cp_size", "cp_interleave", "model", "group"),
)


def layout_digest(layout: KVLayout) -> str:
    """Returns what stands for the contents of one page: 64 hexadecimal digits, the ``layout`` of its key.

    The daemon answers it to who parks; an engine that only fetches computes it of its own cache's layout.
    Equal for any two layouts whose blocks hold the same elements, however many there are and wherever they
    lie: the same slice of layers, heads and context parallelism, tokens a block, dtype and scales.
    """
    return _digest(layout)


@lru_cache(_MOST_KEPT)
def _digest(layout: KVLayout) -> str:
    content: dict[str, Any] = {name: getattr(layout, name) for name in _CONTENT}
    if (scales := layout.quantization) is not None:
        # How values that are too large are stored is a conversion's matter, not of what is stored.
        content["quantization"] = [scales.per, *scales.scales]
    text = json.dumps([_VERSION, content], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@lru_cache(_MOST_KEPT)
def page_nbytes(layout: KVLayout, slab_nbytes: int = 0) -> int:
    """Returns how many bytes of the pool one page of `layout` takes: from its first byte to the next one's.

    Pages of all slabs lie on one grid. Where it costs a slab one page at most the grid's lines are the slabs'
    ends as well: few pages of a slab, which were large, would else be lost where they reach over its end.
    """
    least = pool_layout(layout, 2).block_stride
    most = slab_nbytes // least
    for count in range(most, max(most - 2, 0), -1):
        if slab_nbytes % (count * math.lcm(_ALIGNMENT_NBYTES, layout.itemsize)) == 0:
            return slab_nbytes // count
    return least


def pool_layout(layout: KVLayout, num_blocks: int, nbytes: int = 0) -> KVLayout:
    """Returns how pages of `layout` lie in the pool: one after the other, each in one piece.

    Within a page the axes have the order of `layout`, so that what is contiguous there stays so. Scales of
    pages follow the elements.

    Parameters
    ----------
    num_blocks
        How many there are.
    nbytes
        What each takes, as `page_nbytes` says; 0 for the least.
    """
    strides: dict[str, int] = {}
    used_nbytes = layout.itemsize
    for axis, count in _inner_axes(layout):
        strides[axis] = used_nbytes if count > 1 else 0
        used_nbytes *= count
    quantization = layout.quantization
    if quantization is not None and quantization.in_memory:
        quantization, used_nbytes = _scales_behind(layout, quantization, used_nbytes)
    block_stride = nbytes or -(-used_nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
    if block_stride % layout.itemsize:  # of 3-byte elements, say, no cache line is a multiple
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
        # Layers that were allocated one by one; keys and values lie together or, in each of them, apart.
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
    """Returns where a page's scales lie behind its `nbytes` of elements, and the bytes of both."""
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
