"""compile_program and differences: how many loops there are, what is refused, and the words.

Which byte goes where is compared with an oracle in tests/property/test_plan.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvxfer.layout.quantization import Quantization
from kvxfer.plan.compile import compile_program, differences
from kvxfer.plan.program import GATHER_BELOW_NBYTES, MAX_LOOPS
from tests.unit.plan.caches import cache, never, page_scaled, refused

# ---- slices ---------------------------------------------------------------------------------------


def test_tokens_and_heads_swap_with_the_source_going_upwards() -> None:
    src, dst = cache("l2bthd", tokens=16), cache("l2bhtd", tokens=16)
    program = compile_program(src, dst)
    # Of K and V (2), heads (4) and tokens (16) the shortest is unrolled: two loops over rows of 16 bytes.
    assert len(program.loops) == 2
    for loop in program.loops:
        assert loop["counts"].tolist() == [16, 4]
        assert loop["src_strides"].tolist() == [4 * 16, 16]
        assert loop["dst_strides"].tolist() == [16, 16 * 16]
        assert loop["nbytes"] == 16


# ---- units ----------------------------------------------------------------------------------------


def test_unit_ids_beyond_32_bits_are_refused() -> None:
    src = cache("btlh2d", tokens=4096, num_blocks=1 << 20)
    dst = cache("btlh2d", tokens=4097)
    never(src, dst, "too small a common unit", "4096", "1048576", "4294967296")


# ---- irregular layers -----------------------------------------------------------------------------


def test_listed_offsets_share_loops_where_they_are_regular() -> None:
    layers: dict[str, Any] = {"layers": range(5), "total_layers": 5, "kv": 1}
    dst = cache(**layers)
    offsets = tuple(base + dst.block_stride * 100 for base in (0, 10_240, 20_480, 5_120, 1_024_000))
    src = replace(dst, layer_stride=0, offsets=offsets)
    program = compile_program(src, dst)
    # Layers 0 to 2 step upwards; 3 lies below 2, and 4 is any distance above 3.
    assert program.loops["first_layer"].tolist() == [0, 3]
    assert program.loops["num_layers"].tolist() == [3, 2]


def test_loops_stand_in_the_order_of_layers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    dst = cache(layers=range(20), total_layers=20)
    offsets = tuple(int(x) * 4096 for x in rng.permutation(40))
    program = compile_program(replace(dst, layer_stride=0, kv_stride=0, offsets=offsets), dst, fine=True)
    first = program.loops["first_layer"].astype(int)
    assert (np.diff(first) >= 0).all()
    assert len(program.loops) > 20


def test_too_many_loops_are_refused_before_they_are_made(seed: int) -> None:
    shape: dict[str, Any] = {"layers": range(64), "total_layers": 64, "kv": 1, "tokens": 256}
    shape |= {"heads": range(256), "total_heads": 256, "dim": 256, "dtype": "opaque"}
    dst = cache("l2bhtd", **shape, num_blocks=1)
    offsets = tuple(int(x) << 30 for x in np.random.default_rng(seed).permutation(64))
    src = replace(cache("l2bdth", **shape, num_blocks=1), layer_stride=0, offsets=offsets)
    refused(src, dst, "loops", "256", str(MAX_LOOPS), "one tensor")


# Heads and tokens change places. Agents have these bounds.
@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"dim": (1 << 30) + 1, "kv": 1, "dtype": "opaque"}, ("bytes of a block in one layer", str(1 << 30))),
        (
            {"tokens": 1 << 10, "heads": range(1 << 9), "total_heads": 1 << 9},
            ("runs of a pair", str(1 << 20)),
        ),
        ({"heads": range(70_000), "total_heads": 70_000, "tokens": 1}, ("70000 heads", str(1 << 16))),
        ({"tokens": (1 << 20) + 1, "heads": range(1), "total_heads": 1}, ("1048577 units or tokens",)),
    ],
)
def test_a_program_that_agents_would_refuse_is_not_made(
    shape: dict[str, Any], words: tuple[str, ...]
) -> None:
    refused(cache("l2bhtd", **shape), cache("l2bthd", **shape), *words, "limit", fine=True)


def test_scales_that_are_computed_of_too_much_at_once_are_refused() -> None:
    shape: dict[str, Any] = {"tokens": 1 << 17, "kv": 1, "dim": 64}
    dst = page_scaled(cache(**shape, dtype="int8"), "page")
    refused(cache(**shape), dst, "bytes of a block would have their scales computed at once", str(16 << 20))


# ---- what differs ---------------------------------------------------------------------------------


def test_every_difference_is_named() -> None:
    theirs = cache(dim=16, total_heads=8, dtype="uint8")
    assert len(differences(cache(), theirs)) == 3
    refused(cache(), theirs, "head_dim", "heads of the model", "dtype")


def test_what_engines_differ_in_is_named() -> None:
    never(cache(), cache(kv=1), "keys and values", "told apart", "latent")
    never(cache(), cache(dtype="uint8"), "dtype", "uint8 can only be copied as bytes", "float8_e4m3fn")
    opaque = replace(cache(), dtype="opaque"), cache(dtype="opaque")
    never(*opaque, "bytes of an element", "2 at the source", "1 at the destination")


def test_strides_and_pages_are_no_difference() -> None:
    assert differences(cache(tokens=6), cache("hdtb2l", tokens=4, heads=range(2))) == []


def test_no_common_layer_or_head_is_refused_but_no_difference() -> None:
    low, high = cache(heads=range(2)), cache(heads=range(2, 4))
    assert differences(low, high) == []
    refused(low, high, "no head in common", "0 to 1 of 4", "2 to 3 of 4")
    low, high = cache(layers=range(1)), cache(layers=range(1, 2))
    assert differences(low, high) == []
    refused(low, high, "no layer in common", "0 to 0", "1 to 1")


def test_heads_that_an_end_does_not_hold_are_refused() -> None:
    refused(
        cache(),
        cache(heads=range(2)),
        "0 to 2",
        "destination",
        "0 to 1 of 4",
        code="out-of-range",
        heads=range(3),
    )
    for heads in (range(0), range(0, 4, 2), [0, 1], 4):
        refused(cache(), cache(), "heads", code="invalid-argument", heads=heads)


# ---- explain --------------------------------------------------------------------------------------


def test_explain_says_what_moves_and_how() -> None:
    src, dst = cache(tokens=4, heads=range(1, 3)), cache(tokens=8, layers=range(1, 2))
    words = compile_program(src, dst, fine=True).explain()
    for part in (
        "2 loops",
        "layers 1 to 1 (1 of the 1 at the destination)",
        "heads 1 to 2 (2 of the 4 there)",
        "A unit is 4 tokens: 1 in a block of the source, 2 in a block of the destination",
        "move one by one",
        # 4 tokens × 2 of K and V, each 2 heads of 16 bytes.
        "moves 256 bytes a layer in 8 runs, the smallest of 32 bytes",
        "16 rows of one head merged 2 to a run",
        "adjacent blocks stay apart",
        "Bytes are copied unchanged",
        "gathered at the source",
        "scattered at the destination",
    ):
        assert part in words


def test_long_runs_move_directly() -> None:
    layout = cache("lb2thd", tokens=16, dim=16)
    program = compile_program(layout, layout)
    assert program.smallest_run_nbytes == 4096 >= GATHER_BELOW_NBYTES
    assert not program.gathers_src
    assert not program.scatters_dst
    assert "Direct: contiguous pieces have 512 bytes or more" in program.explain()
    assert "adjacent blocks merge" in program.explain()


def test_conversions_are_gathered_and_told_in_words() -> None:
    dst = cache("lb2thd", tokens=64, dim=16, dtype="float8_e4m3fn", quantization=Quantization.per_tensor(2.0))
    program = compile_program(cache("lb2thd", tokens=64, dim=16, dtype="bfloat16"), dst)
    assert program.gathers_src
    assert not program.scatters_dst
    assert "from bfloat16 (no scales) to float8_e4m3fn (scales per tensor, saturating)" in program.explain()
    assert "adjacent blocks stay apart" in program.explain()
