"""Programs that convert: when they do, and what cannot be bridged.

The numbers that arrive are compared with an oracle in tests/property/test_conversion.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.layout.quantization import Per, Quantization
from kvxfer.plan.compile import compile_program, differences
from tests.unit.plan.caches import cache, never, page_scaled, refused

# ---- conversion -----------------------------------------------------------------------------------


def test_plain_dtypes_convert_without_scales() -> None:
    program = compile_program(cache(dtype="bfloat16"), cache(dtype="float32"))
    assert len(program.loops) == len(program.conversions) == 1
    loop, conversion = program.loops[0], program.conversions[0]
    assert (conversion["src_dtype"], conversion["dst_dtype"]) == (1, 3)
    assert (conversion["src_scales"], conversion["dst_scales"], conversion["saturate"]) == (0, 0, 0)
    # A page is still one run: 128 numbers, 256 bytes at the source, 512 at the destination.
    assert (loop["nbytes"], loop["src_block_stride"], loop["dst_block_stride"]) == (256, 256, 512)
    assert program.pair_nbytes == 1024
    assert len(program.scales) == 0


def test_scales_that_are_equal_collapse() -> None:
    dst = cache(dtype="float8_e4m3fn", quantization=Quantization.per_head(np.full((2, 2, 4), 0.5)))
    program = compile_program(cache(), dst)
    assert program.scales.tolist() == [0.5]
    assert len(program.loops) == 1
    assert program.loops["nbytes"].tolist() == [256]  # the whole page again
    assert program.conversions["dst_layer_stride"].tolist() == [0]


def test_equal_static_scales_are_bytes_as_they_are() -> None:
    table = np.arange(1, 17).reshape(2, 2, 4)
    src = cache(dtype="int8", quantization=Quantization.per_head(table))
    dst = cache(dtype="int8", heads=range(2, 4), quantization=Quantization.per_head(table[:, :, 2:]))
    program = compile_program(src, dst)
    assert len(program.conversions) == len(program.scales) == 0
    assert "Bytes are copied unchanged" in program.explain()


def test_int8_without_scales_is_bytes_alone() -> None:
    assert len(compile_program(cache(dtype="int8"), cache(dtype="int8")).conversions) == 0
    scaled = cache(dtype="int8", quantization=Quantization.per_tensor(1.0))
    never(cache(dtype="int8"), cache(), "int8", "scale", "at the source")
    never(cache(), cache(dtype="int8"), "int8", "scale", "at the destination")
    never(cache(dtype="int8"), scaled, "int8", "at the source")
    never(scaled, cache(dtype="int8"), "int8", "at the destination")
    # Not even a scale of 1 is left out where the code is an integer.
    assert compile_program(scaled, cache()).conversions["src_scales"].tolist() == [1]


# ---- scales of pages ------------------------------------------------------------------------------


def test_granules_that_no_loop_holds_are_refused() -> None:
    dst = page_scaled(cache("l2bthd", dtype="float8_e4m3fn"), "page")
    src = cache("l2dbht")
    assert differences(src, dst) == []
    refused(src, dst, "page scale", "head_dim contiguous")


@pytest.mark.parametrize("per", ["page", "page_head"])
def test_page_scales_take_whole_pages(per: Per) -> None:
    ours = page_scaled(cache(dtype="int8", tokens=4), per)
    theirs = page_scaled(cache(dtype="int8", tokens=8), per)
    never(ours, theirs, "tokens of a block", "4 at the source", "8 at the destination", "whole pages")
    never(cache(tokens=6), ours, "tokens of a block", "units of 2 tokens")
    for src in (ours, cache(tokens=4)):
        refused(src, ours, "one by one", "4 tokens", fine=True)


def test_one_scale_of_all_heads_takes_all_heads() -> None:
    dst = page_scaled(cache(dtype="int8"), "page")
    never(cache(heads=range(2)), dst, "0 to 1 would move", "4 heads", "page_head")
    refused(cache(), dst, "1 to 2 would move", heads=range(1, 3))
    assert compile_program(
        cache(), page_scaled(cache(dtype="int8", heads=range(1, 3)), "page")
    ).heads == range(1, 3)


def test_page_scales_are_found_for_short_dtypes_alone() -> None:
    never(cache(), page_scaled(cache(dtype="bfloat16"), "page"), "float8_e4m3fn", "int8", "not for bfloat16")
    ends = page_scaled(cache(dtype="bfloat16"), "page")
    assert len(compile_program(ends, ends).conversions) == 0
