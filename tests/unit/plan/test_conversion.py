"""Programs that convert: dtypes, static scales, scales of pages, and what cannot be bridged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvxfer.layout.quantization import Per, Quantization
from kvxfer.plan.compile import compile_program, differences
from kvxfer.plan.program import CopyProgram
from tests.unit.plan.expansion import (
    cache,
    expand,
    moved,
    never,
    page_scaled,
    refused,
    wanted,
    whole,
)

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


@pytest.mark.parametrize(
    ("name", "number"),
    [("bfloat16", 1), ("float16", 2), ("float32", 3), ("float8_e4m3fn", 4), ("float8_e5m2", 5)],
)
def test_dtypes_have_their_native_numbers(name: str, number: int) -> None:
    other = "float32" if name != "float32" else "bfloat16"
    assert compile_program(cache(dtype=name), cache(dtype=other)).conversions["src_dtype"].tolist() == [
        number
    ]
    assert compile_program(cache(dtype=other), cache(dtype=name)).conversions["dst_dtype"].tolist() == [
        number
    ]


def scale_of(program: CopyProgram, loop: int, side: str, layer: int, block: int, i: int, j: int) -> int:
    record, row = program.conversions[program.loops[loop]["conversion"] - 1], program.loops[loop]
    return int(
        record[f"{side}_offset"]
        + (layer - row["first_layer"]) * record[f"{side}_layer_stride"]
        + block * record[f"{side}_block_stride"]
        + i * record[f"{side}_strides"][0]
        + j * record[f"{side}_strides"][1]
    )


def test_scales_per_head_cut_runs_at_heads() -> None:
    table = np.arange(1, 17).reshape(2, 2, 4) / 4
    dst = cache(
        dtype="float8_e4m3fn", heads=range(4), quantization=Quantization.per_head(table, saturate=True)
    )
    program = compile_program(cache(heads=range(1, 3)), dst)
    assert program.conversions["saturate"].all()
    assert sorted(program.scales.tolist()) == sorted(table[:, :, 1:3].ravel().tolist())
    # Heads (2), K and V (2), tokens (4): rows of 8 numbers, one scale each.
    assert set(program.loops["nbytes"].tolist()) == {16}
    for k, loop in enumerate(program.loops):
        for i, j in np.ndindex(*loop["counts"].tolist()):
            at = int(loop["dst_offset"] + i * loop["dst_strides"][0] + j * loop["dst_strides"][1])
            kv, head = at // dst.kv_stride, at % dst.token_stride // dst.head_stride
            for layer in range(2):
                scale = program.scales[scale_of(program, k, "dst", layer, 5, i, j)]
                assert scale == np.float32(table[layer, kv, head])


def test_scales_that_are_equal_collapse() -> None:
    dst = cache(dtype="float8_e4m3fn", quantization=Quantization.per_head(np.full((2, 2, 4), 0.5)))
    program = compile_program(cache(), dst)
    assert program.scales.tolist() == [0.5]
    assert len(program.loops) == 1
    assert program.loops["nbytes"].tolist() == [256]  # the whole page again
    assert program.conversions["dst_layer_stride"].tolist() == [0]


def test_scales_that_vary_over_layers_step_with_them() -> None:
    table = np.repeat([[0.5], [0.25]], 2, axis=1)  # K and V of a layer alike
    src = cache(dtype="float8_e5m2", quantization=Quantization.per_layer(table))
    program = compile_program(src, cache())
    assert program.scales.tolist() == [0.5, 0.25]
    record = program.conversions[0]
    assert (len(program.loops), record["src_scales"], record["dst_scales"]) == (1, 1, 0)
    assert record["src_layer_stride"] == 1
    assert record["src_strides"].tolist() == [0, 0]


def test_scales_of_one_are_none() -> None:
    src = cache(dtype="float8_e4m3fn", quantization=Quantization.per_tensor(1.0))
    assert compile_program(src, cache()).conversions["src_scales"].tolist() == [0]
    assert len(compile_program(src, cache(dtype="float8_e4m3fn")).conversions) == 0


def test_irregular_layers_point_each_at_their_scales(seed: int) -> None:
    table = np.arange(1, 11).reshape(5, 2) / 8
    shape: dict[str, Any] = {"layers": range(5), "total_layers": 5}
    dst = cache(dtype="int8", quantization=Quantization.per_layer(table), **shape)
    offsets = tuple(int(x) * 8192 for x in np.random.default_rng(seed).permutation(10))
    src = replace(cache(**shape), layer_stride=0, kv_stride=0, offsets=offsets)
    program = compile_program(src, dst)
    for k, loop in enumerate(program.loops):
        for step in range(int(loop["num_layers"])):
            layer = int(loop["first_layer"]) + step
            at = int(loop["dst_offset"] + step * loop["dst_layer_stride"])
            kv = (at - layer * dst.layer_stride) // dst.kv_stride
            assert program.scales[scale_of(program, k, "dst", layer, 0, 0, 0)] == np.float32(table[layer, kv])


def test_equal_static_scales_are_bytes_as_they_are() -> None:
    table = np.arange(1, 17).reshape(2, 2, 4)
    src = cache(dtype="int8", quantization=Quantization.per_head(table))
    dst = cache(dtype="int8", heads=range(2, 4), quantization=Quantization.per_head(table[:, :, 2:]))
    program = compile_program(src, dst)
    assert len(program.conversions) == len(program.scales) == 0
    assert "Bytes are copied unchanged" in program.explain()


def test_different_static_scales_are_requantised() -> None:
    src = cache(dtype="int8", quantization=Quantization.per_tensor(0.5))
    dst = cache(dtype="int8", quantization=Quantization.per_tensor(0.25))
    program = compile_program(src, dst)
    record = program.conversions[0]
    assert (record["src_dtype"], record["dst_dtype"]) == (6, 6)
    assert program.scales[[int(record["src_offset"]), int(record["dst_offset"])]].tolist() == [0.5, 0.25]


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


def test_page_scales_are_read_from_the_sources_region() -> None:
    src = page_scaled(cache(dtype="float8_e4m3fn", tokens=8), "page_head")
    program = compile_program(src, cache(tokens=4, heads=range(1, 4)), fine=True)
    assert program.units == (2, 1, 8, 4)
    assert src.quantization is not None
    for k, loop in enumerate(program.loops):
        for i, j in np.ndindex(*loop["counts"].tolist()):
            at = int(loop["src_offset"] + i * loop["src_strides"][0] + j * loop["src_strides"][1])
            kv, head = at // src.kv_stride, at % src.token_stride // src.head_stride
            # 4 heads × 8 blocks × 2 of K and V a layer; found by block, whatever the unit.
            scale = src.quantization.offset + (64 + kv * 32 + 3 * 4 + head) * 4
            assert scale_of(program, k, "src", 1, 3, i, j) == scale
            assert loop["nbytes"] <= 8


def test_equal_page_scales_go_along_as_bytes() -> None:
    src = page_scaled(cache(dtype="float8_e4m3fn"), "page_head")
    dst = page_scaled(cache("lb2htd", dtype="float8_e4m3fn", heads=range(2, 4)), "page_head", pad=64)
    program = compile_program(src, dst)
    assert len(program.conversions) == 0
    assert program.pair_nbytes == 2 * 2 * (4 * 8 + 4)
    assert src.quantization is not None
    assert dst.quantization is not None
    ours, theirs = src.quantization.offset, dst.quantization.offset
    # [l, 2, b, h]: a layer has 64 scales at the source, 32 at the destination.
    scales = {
        theirs + (32 + 16 * kv + 6 * 2 + head) * 4 + k: ours + (64 + 32 * kv + 3 * 4 + 2 + head) * 4 + k
        for kv in range(2)
        for head in range(2)
        for k in range(4)
    }
    elements = wanted(src, dst, 1, range(2, 4), whole(3, 6, 4))
    assert moved(program, 1, [3], [6]) == elements | scales


def test_smaller_destination_pages_repeat_their_scales() -> None:
    src = page_scaled(cache(dtype="int8", tokens=8, kv=1), "page")
    dst = page_scaled(cache(dtype="int8", tokens=4, kv=1), "page")
    program = compile_program(src, dst)
    assert program.units == (2, 1, 0, 0)
    assert src.quantization is not None
    assert dst.quantization is not None
    runs = expand(program, 0, [4, 5], [7, 1])  # both halves of block 2
    assert [run for run in runs if run[2] == 4] == [
        (src.quantization.offset + 8, dst.quantization.offset + 28, 4),
        (src.quantization.offset + 8, dst.quantization.offset + 4, 4),
    ]


def test_page_scales_are_found_for_whole_granules() -> None:
    dst = page_scaled(cache("l2bhtd", dtype="float8_e4m3fn", tokens=16), "page_head")
    program = compile_program(cache("l2bthd", tokens=16), dst)
    assert program.conversions["dst_scales"].tolist() == [2] * len(program.conversions)
    for loop in program.loops:
        record = program.conversions[loop["conversion"] - 1]
        steps = record["dst_strides"].tolist()
        inside = [n for n, step in zip(loop["counts"].tolist(), steps, strict=True) if step == 0]
        # All 16 tokens of 8 dims of a head are runs of one scale.
        assert np.prod(inside) * int(loop["nbytes"]) // 2 == 16 * 8
    # 1 byte × 16 tokens × 4 heads × 8 dims and 4 scales, of K and V.
    assert program.pair_nbytes == 2 * (16 * 4 * 8 + 4 * 4)


def test_axes_within_a_granule_are_looped_over_however_short() -> None:
    # dims (8) stay apart at the source, tokens (2) are the shortest axis, but both are in a granule.
    dst = page_scaled(cache("l2bthd", dtype="float8_e4m3fn", tokens=2), "page_head")
    program = compile_program(cache("l2dbht", tokens=2), dst)
    assert len(program.loops) == 2 * 4
    assert {tuple(counts) for counts in program.loops["counts"].tolist()} == {(8, 2)}
    for steps in program.conversions["dst_strides"].tolist():
        assert steps == [0, 0]


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


def test_page_scales_per_head_and_for_all_heads_are_found_anew() -> None:
    src = page_scaled(cache(dtype="int8"), "page")
    dst = page_scaled(cache(dtype="int8"), "page_head")
    record = compile_program(src, dst).conversions[0]
    assert (record["src_scales"], record["dst_scales"]) == (2, 2)
