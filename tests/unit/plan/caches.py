"""Small dense caches, and what is said where no copy program bridges two of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvxfer.errors import UsageError
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.layout.quantization import Per, Quantization
from kvxfer.plan.compile import compile_program, differences

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
