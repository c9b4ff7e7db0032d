"""plan: for any pair of layouts the program copies byte for byte what numpy copies by index.

The oracle indexes numpy views of both caches; it never looks at a stride, an offset or a loop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvxfer.errors import UsageError
from kvxfer.layout import KVLayout
from kvxfer.plan import LOOP_DTYPE, CopyProgram, compile, footprint
from kvxfer.tensor import covering_spans, flatten, view

GUARD = 64


@dataclass
class Cache:
    """A cache in an arena of bytes, seen twice: by numpy views and by a layout."""

    arena: NDArray[np.uint8]
    base: int  # of the region in the arena
    tensors: Any
    #: pages[layer of this rank][kv] is a view [blocks, tokens, heads, dim]
    pages: list[list[NDArray[Any]]]
    layout: KVLayout


@dataclass(frozen=True)
class Shape:
    """What two ends must agree on."""

    kv: int
    tokens: int
    heads: int
    dim: int
    itemsize: int
    total_layers: int


def strided(
    arena: NDArray[np.uint8], at: int, shape: list[int], strides: list[int], dtype: str
) -> NDArray[Any]:
    return np.ndarray(tuple(shape), dtype, buffer=arena.data, offset=at, strides=tuple(strides))


@st.composite
def caches(draw: st.DrawFn, shape: Shape) -> Cache:
    first_layer = draw(st.integers(0, shape.total_layers - 1))
    num_layers = draw(st.integers(1, shape.total_layers - first_layer))
    blocks = draw(st.integers(1, 5))
    per_layer = draw(st.booleans())
    apart = shape.kv == 2 and draw(st.booleans())
    concatenated = shape.kv == 2 and not apart and draw(st.booleans())
    counts = {
        "l": num_layers,
        "2": shape.kv,
        "b": blocks,
        "t": shape.tokens,
        "h": shape.heads,
        "d": shape.dim,
    }
    if concatenated:
        counts["c"] = 2 * counts.pop("d")
    letters = [
        letter
        for letter in counts
        if not (letter == "l" and per_layer)
        and not (letter == "2" and (apart or concatenated or shape.kv == 1))
    ]
    order = draw(st.permutations(letters))
    # From the innermost axis outwards; padding may follow any axis.
    strides: dict[str, int] = {}
    size = shape.itemsize
    for letter in reversed(order):
        strides[letter] = size
        size = size * counts[letter] + draw(st.sampled_from([0, 0, 0, 1, 3])) * shape.itemsize
    num_tensors = (num_layers if per_layer else 1) * (2 if apart else 1)
    starts, at = [], GUARD
    for _ in range(num_tensors):
        at += draw(st.sampled_from([0, 0, 16, 48]))
        starts.append(at)
        at += -(-size // 16) * 16
    if draw(st.booleans()):
        starts = list(draw(st.permutations(starts)))
    arena = np.zeros(at + GUARD, np.uint8)
    dtype = f"V{shape.itemsize}" if shape.itemsize == 16 else f"u{shape.itemsize}"
    made = [
        strided(arena, start, [counts[x] for x in order], [strides[x] for x in order], dtype)
        for start in starts
    ]
    axes = "".join(order)
    common: dict[str, Any] = {"first_layer": first_layer, "total_layers": shape.total_layers, "dtype": "x"}
    if num_tensors == 1:
        tensors: Any = made[0]
        layout = KVLayout.from_tensor(tensors, axes, **common)
    else:
        if not per_layer:
            tensors = tuple(made)
        elif apart:
            tensors = {f"layer.{i}": (made[2 * i], made[2 * i + 1]) for i in range(num_layers)}
        else:
            tensors = list(made)
        if per_layer and num_layers == 1 and apart:
            tensors = [tuple(made)]
        layout = KVLayout.from_tensors(tensors, axes, **common)
    pages = []
    for i in range(num_layers):
        row = []
        for kv in range(shape.kv):
            which = (i if per_layer else 0) * (2 if apart else 1) + (kv if apart else 0)
            page, names = made[which], list(order)
            for letter, index in (("l", i), ("2", kv)):
                if letter in names:
                    page = page[(slice(None),) * names.index(letter) + (index,)]
                    names.remove(letter)
            if concatenated:
                half = counts["c"] // 2
                cut = slice(kv * half, (kv + 1) * half)
                page = page[(slice(None),) * names.index("c") + (cut,)]
                names[names.index("c")] = "d"
            row.append(np.transpose(page, [names.index(x) for x in "bthd"]))
        pages.append(row)
    start_of_arena = view(arena).address
    base = covering_spans([view(x) for x in flatten(tensors)])[0][0] - start_of_arena
    return Cache(arena, base, tensors, pages, layout)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Cache, Cache]:
    shape = Shape(
        kv=draw(st.integers(1, 2)),
        tokens=draw(st.integers(1, 4)),
        heads=draw(st.integers(1, 3)),
        dim=draw(st.integers(1, 5)),
        itemsize=draw(st.sampled_from([1, 2, 4, 8])),
        total_layers=draw(st.integers(1, 5)),
    )
    return draw(caches(shape)), draw(caches(shape))


@st.composite
def tables(draw: st.DrawFn, src: Cache, dst: Cache) -> tuple[list[int], list[int]]:
    dst_blocks = draw(st.lists(st.integers(0, dst.layout.num_blocks - 1), unique=True))
    repeated = st.lists(
        st.integers(0, src.layout.num_blocks - 1), min_size=len(dst_blocks), max_size=len(dst_blocks)
    )
    return draw(repeated), dst_blocks


def run(
    program: CopyProgram,
    src: NDArray[np.uint8],
    dst: NDArray[np.uint8],
    src_blocks: list[int],
    dst_blocks: list[int],
    layers: range,
) -> None:
    """Executes the loops as native/include/kvxfer/copy_program.h describes them."""
    for loop in program.loops:
        n = int(loop["nbytes"])
        for layer in layers:
            step = layer - int(loop["first_layer"])
            if not 0 <= step < int(loop["num_layers"]):
                continue
            for s, d in zip(src_blocks, dst_blocks, strict=True):
                for i in range(int(loop["counts"][0])):
                    for j in range(int(loop["counts"][1])):
                        at = {
                            side: int(loop[f"{side}_offset"])
                            + step * int(loop[f"{side}_layer_stride"])
                            + block * int(loop[f"{side}_block_stride"])
                            + i * int(loop[f"{side}_strides"][0])
                            + j * int(loop[f"{side}_strides"][1])
                            for side, block in (("src", s), ("dst", d))
                        }
                        assert at["src"] + n <= len(src)
                        assert at["dst"] + n <= len(dst)
                        dst[at["dst"] : at["dst"] + n] = src[at["src"] : at["src"] + n]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_program_copies_what_indexing_copies(data: st.DataObject) -> None:
    src, dst = data.draw(pairs())
    common = [layer for layer in src.layout.layers if layer in dst.layout.layers]
    if not common:
        with pytest.raises(UsageError, match="no layer is common"):
            compile(src.layout, dst.layout)
        return
    src_blocks, dst_blocks = data.draw(tables(src, dst))
    first = data.draw(st.integers(0, len(common) - 1))
    wanted = common[first : data.draw(st.integers(first + 1, len(common)))]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    src.arena[:] = rng.integers(0, 256, len(src.arena), np.uint8)
    dst.arena[:] = rng.integers(0, 256, len(dst.arena), np.uint8)

    program = compile(src.layout, dst.layout)
    moved = dst.arena.copy()
    start, count = program.window(wanted)
    run(
        program, src.arena[src.base :], moved[dst.base :], src_blocks, dst_blocks, range(start, start + count)
    )

    for layer in wanted:
        for kv in range(src.layout.num_kv):
            theirs = dst.pages[layer - dst.layout.first_layer][kv]
            ours = src.pages[layer - src.layout.first_layer][kv]
            for s, d in zip(src_blocks, dst_blocks, strict=True):
                theirs[d] = ours[s]
    np.testing.assert_array_equal(moved, dst.arena)

    page_nbytes = src.layout.page_nbytes
    assert program.pair_nbytes == page_nbytes
    assert program.explain()
    assert list(program.layers) == common
    assert program.num_program_layers == dst.layout.num_layers


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_footprint_is_each_byte_of_a_block_once(data: st.DataObject) -> None:
    cache, _ = data.draw(pairs())
    loops = footprint(cache.layout)
    for name in ("offset", "layer_stride", "block_stride", "strides"):
        np.testing.assert_array_equal(loops[f"src_{name}"], loops[f"dst_{name}"])
    touched = np.zeros(len(cache.arena), np.uint8)
    program = compile(cache.layout, cache.layout)
    for layer in range(cache.layout.num_layers):
        for block in range(cache.layout.num_blocks):
            ones = np.ones(len(touched), np.uint8)
            once = np.zeros(len(touched), np.uint8)
            run(program, ones[cache.base :], once[cache.base :], [block], [block], range(layer, layer + 1))
            assert int(once.sum()) == cache.layout.page_nbytes
            touched += once
    assert touched.max() == 1
    expected = np.zeros_like(touched)
    cache.arena[:] = 0
    for row in cache.pages:
        for page in row:
            page[...] = np.frombuffer(b"\xff" * page.dtype.itemsize, page.dtype)[0]
    expected[cache.arena != 0] = 1
    np.testing.assert_array_equal(touched, expected)
    assert cache.layout.nbytes == int(np.flatnonzero(expected)[-1]) + 1 - cache.base


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_layout_survives_the_wire(data: st.DataObject) -> None:
    cache, _ = data.draw(pairs())
    assert KVLayout.from_bytes(cache.layout.to_bytes()) == cache.layout


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_layout_from_damaged_bytes_raises_words_alone(data: st.DataObject) -> None:
    cache, _ = data.draw(pairs())
    encoded = bytearray(cache.layout.to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(encoded) - 1))
        encoded[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    try:
        layout = KVLayout.from_bytes(bytes(encoded))
    except UsageError as error:
        words = str(error)
    else:
        words = repr(KVLayout.from_bytes(layout.to_bytes()) == layout)
    assert len(words) < 2000
    assert words != "False"


def test_loop_dtype_has_the_native_size() -> None:
    assert LOOP_DTYPE.itemsize == 112


def test_whole_contiguous_blocks_are_one_run() -> None:
    kv = np.zeros((2, 4, 2, 16, 8, 64), np.float16)
    layout = KVLayout.from_tensor(kv, "lb2thd")
    program = compile(layout, layout)
    assert len(program.loops) == 1
    assert program.runs_per_pair == 1
    assert program.smallest_run_nbytes == layout.page_nbytes
    assert "adjacent blocks merge" in program.explain()


def test_layers_apart_in_equal_steps_share_a_loop() -> None:
    kv = np.zeros((6, 2, 4, 16, 8, 64), np.float16)
    stacked = KVLayout.from_tensor(kv, "l2bthd")
    listed = KVLayout.from_tensors(list(kv), "2bthd")
    assert listed == stacked
    assert len(compile(listed, stacked).loops) == 1


def test_mismatch_names_every_field() -> None:
    ours = KVLayout.from_tensor(np.zeros((2, 2, 4, 16, 8, 64), np.float16), "l2bthd")
    theirs = KVLayout.from_tensor(np.zeros((2, 2, 4, 32, 4, 128), np.uint8), "l2bthd")
    with pytest.raises(UsageError) as caught:
        compile(ours, theirs)
    assert caught.value.code == "layout-mismatch"
    for word in ("dtype", "tokens of a block", "head_dim", "heads", "16", "32"):
        assert word in str(caught.value)


def test_more_than_two_strided_axes_are_unrolled_the_shortest_first() -> None:
    wide = replace(
        KVLayout.from_tensor(np.zeros((1, 2, 1, 128, 128, 2), np.uint8), "l2bthd"),
        token_stride=1 << 20,
        head_stride=4096,
        dim_stride=2,
        kv_stride=1 << 30,
    )
    other = replace(wide, token_stride=4096, head_stride=1 << 20)
    program = compile(wide, other)
    assert len(program.loops) == 4  # 2 of K and V × 2 of dim
    assert {tuple(counts) for counts in program.loops["counts"].tolist()} == {(128, 128)}


def test_a_program_of_too_many_loops_is_refused_in_words() -> None:
    regular = KVLayout.from_tensor(np.zeros((64, 1, 1, 1, 1), np.uint8), "lbthd")
    strided = replace(
        regular,
        block_tokens=256,
        num_heads=256,
        total_heads=256,
        head_dim=256,
        token_stride=1 << 20,
        head_stride=1 << 11,
        dim_stride=2,
        layer_stride=1 << 30,
    )
    other = replace(strided, token_stride=1 << 11, head_stride=1 << 20)
    offsets = tuple(int(x) << 30 for x in np.random.default_rng(3).permutation(64))
    program = replace(other, layer_stride=0, offsets=offsets)
    with pytest.raises(UsageError, match="loops") as caught:
        compile(strided, program)
    assert caught.value.code == "layout-mismatch"
