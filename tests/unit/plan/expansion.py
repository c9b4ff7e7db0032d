"""Small dense caches, and what a copy program does to them: its formula, and indexing, byte by byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import UsageError
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.layout.quantization import Per, Quantization
from kvxfer.plan.compile import compile_program, differences
from kvxfer.plan.program import CopyProgram

NUM_BLOCKS = 8


def cache(
    axes: str = "l2bthd",
    *,
    dtype: str = "float16",
    layers: range = range(2),
    total_layers: int = 2,
    heads: range = range(4),
    total_heads: int = 4,
    tokens: int = 4,
    dim: int = 8,
    kv: int = 2,
    **fields: Any,
) -> KVLayout:
    """A dense cache whose axes lie in the order of `axes`, outermost first."""
    itemsize = {"float32": 4, "float16": 2, "bfloat16": 2}.get(dtype, 1)
    counts = {"l": len(layers), "2": kv, "b": NUM_BLOCKS, "t": tokens, "h": len(heads), "d": dim}
    strides, nbytes = {}, itemsize
    for letter in reversed(axes):
        strides[letter] = nbytes if counts[letter] > 1 else 0
        nbytes *= counts[letter]
    values: dict[str, Any] = {
        "dtype": dtype,
        "itemsize": itemsize,
        "num_blocks": NUM_BLOCKS,
        "block_tokens": tokens,
        "num_kv": kv,
        "head_dim": dim,
        "first_layer": layers.start,
        "num_layers": len(layers),
        "total_layers": total_layers,
        "first_head": heads.start,
        "num_heads": len(heads),
        "total_heads": total_heads,
        "block_stride": strides["b"],
        "token_stride": strides["t"],
        "head_stride": strides["h"],
        "dim_stride": strides["d"],
        "layer_stride": strides["l"],
        "kv_stride": strides["2"],
    }
    return KVLayout(**(values | fields))


def page_scaled(layout: KVLayout, per: Per, *, pad: int = 0) -> KVLayout:
    """The same cache with float32 scales behind its elements, [l, 2, b(, h)]."""
    num_heads = layout.num_heads if per == "page_head" else 1
    head = 4 if num_heads > 1 else 0
    block = 4 * num_heads
    kv = block * layout.num_blocks
    quantization = Quantization(
        per,
        offset=-(-layout.nbytes // 4) * 4 + pad,
        layer_stride=kv * layout.num_kv if layout.num_layers > 1 else 0,
        kv_stride=kv if layout.num_kv > 1 else 0,
        block_stride=block,
        head_stride=head,
    )
    return replace(layout, quantization=quantization)


def expand(
    program: CopyProgram, layer: int, src_ids: list[int], dst_ids: list[int], grain: int = 0
) -> list[tuple[int, int, int]]:
    """Runs (src, dst, nbytes) of one layer, in program order, by the formula of copy_program.h."""
    units = program.units[2 * grain : 2 * grain + 2]
    found = []
    for loop in program.loops:
        step = layer - int(loop["first_layer"])
        if int(loop["grain"]) != grain or not 0 <= step < int(loop["num_layers"]):
            continue
        for ids in zip(src_ids, dst_ids, strict=True):
            i, j = np.indices(tuple(loop["counts"].tolist()))
            at = [
                int(loop[f"{side}_offset"])
                + step * int(loop[f"{side}_layer_stride"])
                + unit // num * int(loop[f"{side}_block_stride"])
                + unit % num * int(loop[f"{side}_unit_stride"])
                + i * int(loop[f"{side}_strides"][0])
                + j * int(loop[f"{side}_strides"][1])
                for side, unit, num in zip(("src", "dst"), ids, units, strict=True)
            ]
            found += [
                (int(s), int(d), int(loop["nbytes"])) for s, d in zip(at[0].flat, at[1].flat, strict=True)
            ]
    return found


def moved(program: CopyProgram, layer: int, src_ids: list[int], dst_ids: list[int]) -> dict[int, int]:
    """Destination byte -> source byte; every byte once."""
    found: dict[int, int] = {}
    for src, dst, nbytes in expand(program, layer, src_ids, dst_ids):
        for k in range(nbytes):
            assert dst + k not in found
            found[dst + k] = src + k
    return found


def element(layout: KVLayout, layer: int, kv: int, block: int, token: int, head: int, dim: int) -> int:
    """The first byte of an element; layer and head numbered model-wide."""
    return int(
        layout.layer_offsets()[layer - layout.first_layer, kv]
        + block * layout.block_stride
        + token * layout.token_stride
        + (head - layout.first_head) * layout.head_stride
        + dim * layout.dim_stride
    )


def wanted(
    src: KVLayout, dst: KVLayout, layer: int, heads: range, places: list[tuple[int, int, int, int]]
) -> dict[int, int]:
    """The same for tokens at places (src block, src slot, dst block, dst slot), by index."""
    found: dict[int, int] = {}
    for src_block, src_slot, dst_block, dst_slot in places:
        for kv, head, dim in np.ndindex(src.num_kv, len(heads), src.head_dim):
            s = element(src, layer, kv, src_block, src_slot, heads[head], dim)
            d = element(dst, layer, kv, dst_block, dst_slot, heads[head], dim)
            found |= {d + k: s + k for k in range(src.itemsize)}
    return found


def whole(src_block: int, dst_block: int, tokens: int) -> list[tuple[int, int, int, int]]:
    return [(src_block, slot, dst_block, slot) for slot in range(tokens)]


def refused(src: KVLayout, dst: KVLayout, *words: str, code: str = "layout-mismatch", **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        compile_program(src, dst, **options)
    assert caught.value.code == code
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


def never(src: KVLayout, dst: KVLayout, *words: str) -> None:
    """Checks that the layouts are refused, and that `differences` says so before anything is posted."""
    found = differences(src, dst)
    assert len(found) == 1
    for word in words:
        assert word in found[0]
    refused(src, dst, *words)
