"""What a transfer between two dtypes or quantizations must leave in memory, element by element.

The sibling of oracle.py for elements that change on the way; numbers are ml_dtypes', scales are found
by the fields of `Quantization` alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.layout.kv_layout import KVLayout
from tests.property import rounding
from tests.property.oracle import (
    Bytes,
    Moves,
    Offsets,
    byte_offsets,
    common_heads,
    common_layers,
    cut,
    extent,
    local_token,
)

PAGED = ("page", "page_head")


def scale_offsets(layout: KVLayout, blocks: Sequence[int]) -> Offsets:
    """Returns the byte of the page scale of some tokens, [num_layers, num_kv, num_tokens, num_heads]."""
    scaled = layout.quantization
    assert scaled is not None
    where: Offsets = (
        scaled.offset
        + np.arange(layout.num_layers, dtype=np.int64)[:, None, None, None] * scaled.layer_stride
        + np.arange(layout.num_kv, dtype=np.int64)[None, :, None, None] * scaled.kv_stride
        + np.array(blocks, np.int64)[None, None, :, None] * scaled.block_stride
        + np.arange(layout.num_heads, dtype=np.int64)[None, None, None, :] * scaled.head_stride
    )
    return where


def region_nbytes(layout: KVLayout) -> int:
    """Returns the bytes of a region with the elements and the scales in it."""
    nbytes = extent(layout)
    if layout.quantization is not None and layout.quantization.per in PAGED:
        nbytes = max(nbytes, int(scale_offsets(layout, range(layout.num_blocks)).max()) + 4)
    return nbytes


def read_floats(memory: Bytes, where: Offsets) -> NDArray[np.float32]:
    """Returns the float32 numbers that lie at these bytes."""
    raw = np.ascontiguousarray(memory[where[..., None] + np.arange(4)])
    return raw.view("<f4")[..., 0]


def static_scales(layout: KVLayout) -> NDArray[np.float32]:
    """Returns the scales that a layout lists, [num_layers, num_kv, 1, num_heads]."""
    scaled = layout.quantization
    assert scaled is not None
    listed = np.array(scaled.scales, np.float32)
    whole = (layout.num_layers, layout.num_kv, 1, layout.num_heads)
    if scaled.per == "head":
        return listed.reshape(whole)
    if scaled.per == "layer":
        listed = listed.reshape(layout.num_layers, layout.num_kv, 1, 1)
    return np.broadcast_to(listed, whole)


def moves_bytes(src: KVLayout, dst: KVLayout, layers: Sequence[int], heads: Sequence[int]) -> bool:
    """Returns whether elements are the same numbers at both ends, so that nothing is rounded."""
    if src.dtype != dst.dtype:
        return False
    ours, theirs = src.quantization, dst.quantization
    if ours is None or theirs is None:
        return ours is None and theirs is None
    if ours.per in PAGED or theirs.per in PAGED:
        return ours.per == theirs.per
    return np.array_equal(
        cut(static_scales(src), src, layers, heads),
        cut(static_scales(dst), dst, layers, heads),
    )


def obstacle(src: KVLayout, dst: KVLayout, heads: range | None, fine: bool) -> str | None:
    """Returns why no program can move this, None when one can."""
    for name in (src.dtype, dst.dtype):
        if name not in rounding.DTYPES and src.dtype != dst.dtype:
            return f"{name} is no number"
    bare = [x for x in (src, dst) if x.dtype == "int8" and x.quantization is None]
    if len(bare) == 1:
        return "an int8 without a scale has no value"
    columns = common_heads(src, dst, heads)
    scaled = dst.quantization
    if scaled is None or scaled.per not in PAGED:
        return None
    # A page scale applies to a whole page, so it can be written only if the whole page arrives at once.
    if fine:
        return "a part of a page would change its scale"
    steps = [src.block_tokens]
    # Ranks that take the same turns hold the same tokens, however short a turn is.
    period = math.lcm(src.cp_size * src.cp_interleave, dst.cp_size * dst.cp_interleave)
    if any(local_token(src, token) != local_token(dst, token) for token in range(period)):
        steps += [layout.cp_interleave for layout in (src, dst) if layout.cp_size > 1]
    if any(step % dst.block_tokens for step in steps):
        return "a page of the destination comes from several"
    if scaled.per == "page" and len(columns) != dst.num_heads:
        return "some heads of a page would change its scale"
    return None


def is_scattered(src: KVLayout, dst: KVLayout) -> bool:
    """Whether a page of the destination has one scale for all heads and dims lie apart at one end.

    Tokens, heads and dims may be one axis more than a program can go through at once.
    """
    scaled = dst.quantization
    return (
        scaled is not None
        and scaled.per == "page"
        and any(layout.dim_stride > rounding.DTYPES[layout.dtype].itemsize for layout in (src, dst))
    )


def converted(
    src: KVLayout,
    dst: KVLayout,
    moved: Moves,
    src_memory: Bytes,
    dst_memory: Bytes,
    *,
    heads: range | None = None,
) -> Bytes:
    """Returns what the destination's memory is after the transfer."""
    layers, columns = common_layers(src, dst), common_heads(src, dst, heads)
    after = dst_memory.copy()
    from_bytes = cut(byte_offsets(src, moved.src_blocks, moved.src_slots), src, layers, columns)
    to_bytes = cut(byte_offsets(dst, moved.dst_blocks, moved.dst_slots), dst, layers, columns)
    ours, theirs = src.quantization, dst.quantization

    def places(layout: KVLayout, blocks: Sequence[int]) -> Offsets:
        return cut(scale_offsets(layout, blocks), layout, layers, columns)

    if moves_bytes(src, dst, layers, columns):
        after[to_bytes] = src_memory[from_bytes]
        if theirs is not None and theirs.per in PAGED:
            every = np.arange(4)
            after[places(dst, moved.dst_blocks)[..., None] + every] = src_memory[
                places(src, moved.src_blocks)[..., None] + every
            ]
        return after

    # [layers, kv, tokens, heads, dim]
    stored: NDArray[Any] = np.ascontiguousarray(src_memory[from_bytes]).view(rounding.DTYPES[src.dtype])[
        ..., 0
    ]
    x = rounding.widen(stored)
    with np.errstate(all="ignore"):
        if ours is not None and ours.per in PAGED:
            x = x * read_floats(src_memory, places(src, moved.src_blocks))[..., None]
        elif ours is not None:
            x = x * cut(static_scales(src), src, layers, columns)[..., None]
        if theirs is not None and theirs.per in PAGED:
            where = places(dst, moved.dst_blocks)
            for place in np.unique(where):
                granule = where == place
                scale = rounding.dynamic_scale(x[granule], dst.dtype)
                after[place + np.arange(4)] = np.frombuffer(scale.tobytes(), np.uint8)
                x[granule] = x[granule] / scale
        elif theirs is not None:
            x = x / cut(static_scales(dst), dst, layers, columns)[..., None]
    # What has not said saturates if its largest number is below what may come in.
    if theirs is not None:
        saturate = theirs.saturate
    elif ours is not None:
        saturate = dst.dtype != "float32"
    else:
        saturate = rounding.LARGEST[dst.dtype] < rounding.LARGEST[src.dtype]
    out = rounding.narrow(x, dst.dtype, saturate)
    after[to_bytes] = np.ascontiguousarray(out)[..., None].view(np.uint8)
    return after


def same_nans(dst: KVLayout, moved: Moves, memory: Bytes, *, heads: range | None = None) -> Bytes:
    """Returns the memory with the same bits for every NaN, because a NaN's bits are not defined."""
    layers = range(dst.first_layer, dst.first_layer + dst.num_layers)
    columns = [
        x for x in range(dst.first_head, dst.first_head + dst.num_heads) if heads is None or x in heads
    ]
    where = cut(byte_offsets(dst, moved.dst_blocks, moved.dst_slots), dst, layers, columns)
    stored: NDArray[Any] = np.ascontiguousarray(memory[where]).view(rounding.DTYPES[dst.dtype])[..., 0]
    out = memory.copy()
    if dst.dtype != "int8":
        out[where[np.isnan(stored.astype(np.float32))]] = 0x7F
    return out
