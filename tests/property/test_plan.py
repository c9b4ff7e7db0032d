"""compile_program, pair_units and executor: what arrives between two layouts is what the oracle computes.

Every example is judged twice. The loops are expanded by the formula of their format, and each byte
of the destination must come from the very byte that index arithmetic names, once. Then the native
executor copies, packs and unpacks, and the destination's whole memory must be what the model has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvxfer import _native
from kvxfer.errors import UsageError
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.plan.compile import compile_program, differences, footprint
from kvxfer.plan.program import CopyProgram
from kvxfer.plan.sharding import route
from kvxfer.plan.units import pair_units
from tests.property.acceptance import require_accepted
from tests.property.interpreter import Pairs, program_map, unit_tokens, units
from tests.property.oracle import (
    byte_offsets,
    common_heads,
    common_layers,
    describe_byte,
    describe_layout,
    expected,
    extent,
    fill,
    first_difference,
    moves,
    poison,
    source_map,
)
from tests.property.strategies import (
    NUM_EXAMPLES,
    Draw,
    Example,
    draw_family,
    draw_model,
    draw_pages,
    draw_world,
    examples,
    make_layout,
    number,
    pages,
    parts,
    pick,
    transfers,
    upto,
)

# A run has a bound in CI; how long a million examples take is not this file's to say.
pytestmark = pytest.mark.timeout(0 if NUM_EXAMPLES > 100_000 else 300)


def pairs_of(example: Example) -> Pairs:
    found = pair_units(
        example.src,
        example.dst,
        np.array(example.src_table, np.uint32),
        np.array(example.dst_table, np.uint32),
        example.tokens,
    )
    return Pairs(found.src_ids, found.dst_ids, found.num_fine)


def most_loops(src: KVLayout, dst: KVLayout, num_layers: int, num_heads: int, tokens: int) -> int:
    """Returns how many loops suffice in one grain, whatever the strides.

    Two of the axes within a unit are loops, the others are unrolled, and so are layers where an end
    lists its offsets.
    """
    axes = sorted((src.num_kv, tokens, num_heads, src.head_dim))
    unrolled = math.prod(axes[:2])
    if src.offsets or dst.offsets:
        # K and V of a listed layer lie anywhere.
        unrolled = num_layers * src.num_kv * min(tokens, num_heads, src.head_dim)
    return unrolled


def require_map(
    example: Example, got: NDArray[np.int64], times: NDArray[np.int64], wanted: NDArray[np.int64]
) -> None:
    wrong = np.flatnonzero((got != wanted) | (times != (wanted >= 0)))
    if not len(wrong):
        return
    at = int(wrong[0])

    def source(byte: int) -> str:
        return "none" if byte < 0 else describe_byte(example.src, example.src_table, byte)

    pytest.fail(
        f"{len(wrong)} bytes of the destination are wrong, the first is "
        f"{describe_byte(example.dst, example.dst_table, at)}\n  it is written {times[at]} times\n"
        f"  from        {source(int(got[at]))}\n  instead of  {source(int(wanted[at]))}{example!r}"
    )


def require_shape(example: Example, program: CopyProgram, fine: bool) -> None:
    """Checks the figures that a program states about itself against the layouts."""
    src, dst = example.src, example.dst
    layers, heads = common_layers(src, dst), common_heads(src, dst, example.heads)
    unit = unit_tokens(src, dst)
    assert (program.src_units, program.dst_units) == (src.block_tokens // unit, dst.block_tokens // unit)
    if fine and (program.loops["grain"] == 1).any():
        assert (program.src_tokens, program.dst_tokens) == (src.block_tokens, dst.block_tokens)
    else:
        assert (program.src_tokens, program.dst_tokens) == (0, 0)
    assert list(program.layers) == layers
    assert program.num_program_layers == dst.num_layers
    assert tuple(program.dst_heads) == (heads[0] - dst.first_head, len(heads), dst.num_heads)
    for grain, tokens in ((0, unit), (1, 1)):
        num_loops = int((program.loops["grain"] == grain).sum())
        most = most_loops(src, dst, len(layers), len(heads), tokens)
        assert num_loops <= most, f"{num_loops} loops of grain {grain} where {most} suffice{example!r}"
    for name in ("loops", "conversions", "scales"):
        assert not getattr(program, name).flags.writeable


def run_natively(
    program: CopyProgram,
    layers: Sequence[int],
    pairs: Pairs,
    src: NDArray[np.uint8],
    dst: NDArray[np.uint8],
    *,
    packed: bool,
) -> int:
    """Moves layers of a program with the native executor, or as a piece; returns the bytes of all pieces."""
    nbytes = 0
    for layer in layers:
        which = (
            program.loops,
            program.conversions,
            program.scales,
            units(program),
            layer,
            pairs.src_ids,
            pairs.dst_ids,
            pairs.num_fine,
        )
        if packed:
            piece = _native.pack(*which, src)
            nbytes += len(piece)
            _native.unpack(*which, piece, dst)
        else:
            _native.execute(*which, src, dst)
    return nbytes


def native_map(
    program: CopyProgram, layers: Sequence[int], pairs: Pairs, dst_nbytes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns what `program_map` does, from the runs that the native executors see."""
    origin, times = np.full(dst_nbytes, -1, np.int64), np.zeros(dst_nbytes, np.int64)
    for layer in layers:
        found = _native.expand(
            program.loops, layer, pairs.src_ids, pairs.dst_ids, pairs.num_fine, units(program)
        ).astype(np.int64)
        first = np.repeat(np.cumsum(found[:, 2]) - found[:, 2], found[:, 2])
        within = np.arange(len(first)) - first
        dst = np.repeat(found[:, 1], found[:, 2]) + within
        origin[dst] = np.repeat(found[:, 0], found[:, 2]) + within
        times += np.bincount(dst, minlength=dst_nbytes)
    return origin, times


def draw_window(draw: Draw, layers: Sequence[int]) -> list[int]:
    """Draws some consecutive ones of the common layers; mostly all."""
    if draw(upto(3)) < 3:
        return list(layers)
    start = draw(upto(len(layers) - 1))
    return list(layers[start : start + 1 + draw(upto(len(layers) - 1 - start))])


@pytest.mark.parametrize("count", parts(0.32), ids=str)
def test_every_byte_comes_from_where_indexing_says_once(count: int) -> None:
    @examples(count)
    @given(transfers(), st.booleans(), st.data())
    def check(example: Example, fine: bool, data: st.DataObject) -> None:
        src, dst = example.src, example.dst
        wanted = draw_window(data.draw, common_layers(src, dst))
        moved = moves(src, dst, example.src_table, example.dst_table, example.tokens)
        pairs = pairs_of(example)
        fine = fine or pairs.num_fine > 0
        program = compile_program(src, dst, heads=example.heads, fine=fine)
        require_shape(example, program, fine)
        require_accepted(program, src, dst)
        numbered = range(wanted[0] - dst.first_layer, wanted[-1] + 1 - dst.first_layer)

        origin = source_map(src, dst, moved, extent(dst), layers=wanted, heads=example.heads)
        got, times = program_map(program, numbered, pairs, extent(dst))
        require_map(example, got, times, origin)
        require_map(example, *native_map(program, numbered, pairs, extent(dst)), origin)

        src_memory, before = poison(extent(src), 1), poison(extent(dst), 2)
        fill(src, src_memory, example.src_table)
        after = expected(src, dst, moved, example.src_table, before, layers=wanted, heads=example.heads)
        assert np.array_equal(np.where(origin >= 0, src_memory[origin], before), after)
        for packed in (False, True):
            what = "pack and unpack" if packed else "execute"
            memory, unchanged = before.copy(), src_memory.copy()
            nbytes = run_natively(program, numbered, pairs, src_memory, memory, packed=packed)
            if wrong := first_difference(what, dst, example.dst_table, memory, after):
                pytest.fail(f"{wrong}{example!r}")
            assert np.array_equal(src_memory, unchanged), f"{what} wrote into the source"
            if packed:
                assert nbytes == int((origin >= 0).sum()), "a piece is as large as what it carries"

    check()


@pytest.mark.parametrize("count", parts(0.05), ids=str)
def test_all_sources_of_a_route_fill_every_destination_once(count: int) -> None:
    @examples(count)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        model = draw_model(data.draw)
        sides = []
        src_tokens, dst_tokens = draw_pages(data.draw, model)
        num_tokens = data.draw(st.integers(0, 12), label="tokens")
        for block_tokens in (src_tokens, dst_tokens):
            ranks = draw_world(data.draw, model, max_tp=4, context=False)
            family, seed = draw_family(data.draw), data.draw(st.integers(0, 31))
            layouts, tables = [], []
            for i, rank in enumerate(ranks):
                one = make_layout(model, rank, family, num_blocks=1, block_tokens=block_tokens)
                table, num_blocks = number(pages(one, num_tokens), -1, seed and seed + i, 1)
                layouts.append(
                    make_layout(model, rank, family, num_blocks=num_blocks, block_tokens=block_tokens)
                )
                tables.append(table)
            sides.append((layouts, tables))
        (srcs, src_tables), (dsts, dst_tables) = sides
        for name, layouts in (("src", srcs), ("dst", dsts)):
            for layout in layouts:
                note(describe_layout(name, layout))
        sent = []
        for layout, table in zip(srcs, src_tables, strict=True):
            sent.append(poison(extent(layout), 1))
            fill(layout, sent[-1], table)
        shares = route(srcs, dsts)
        for d, dst in enumerate(dsts):
            memory, times = poison(extent(dst), 2), np.zeros(extent(dst), np.int64)
            wanted = memory.copy()
            fill(dst, wanted, dst_tables[d])
            tokens = range(num_tokens)
            there = moves(dst, dst, dst_tables[d], dst_tables[d], tokens)
            for share in (x for x in shares if x.dst == d):
                src = srcs[share.src]
                example = Example(src, dst, src_tables[share.src], dst_tables[d], tokens, share.heads)
                pairs = pairs_of(example)
                program = compile_program(src, dst, heads=share.heads, fine=pairs.num_fine > 0)
                layers = range(share.layers.start - dst.first_layer, share.layers.stop - dst.first_layer)
                _, once = program_map(program, layers, pairs, extent(dst))
                times += once
                run_natively(program, layers, pairs, sent[share.src], memory, packed=False)
            # The last page may be partly filled: only the sequence's tokens count.
            mine = np.zeros(extent(dst), np.int64)
            mine[byte_offsets(dst, there.dst_blocks, there.dst_slots)] = 1
            if wrong := first_difference(f"times written, dst {d}", dst, dst_tables[d], times, mine):
                pytest.fail(wrong)
            wanted = np.where(mine == 1, wanted, poison(extent(dst), 2))
            if wrong := first_difference(f"dst {d}", dst, dst_tables[d], memory, wanted):
                pytest.fail(wrong)

    check()


@pytest.mark.parametrize("count", parts(0.03), ids=str)
def test_what_is_out_of_common_is_refused(count: int) -> None:
    @examples(count)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        model = draw_model(data.draw)
        ends = [
            make_layout(
                model,
                pick(data.draw, draw_world(data.draw, model, context=False)),
                draw_family(data.draw),
                num_blocks=2,
                block_tokens=1,
            )
            for _ in range(2)
        ]
        src, dst = ends
        if common_layers(src, dst) and common_heads(src, dst):
            assert len(compile_program(src, dst).loops)
        else:
            with pytest.raises(UsageError, match=r"layer|head") as caught:
                compile_program(*ends)
            assert any(letter.isdigit() for letter in str(caught.value))

    check()


def wider_heads(layout: KVLayout) -> KVLayout:
    """Returns a cache with one more element a head, and room for it whatever the strides were."""
    room = [layout.itemsize * (1 << bits) for bits in (10, 16, 22, 36, 40)]
    return replace(
        layout,
        head_dim=layout.head_dim + 1,
        dim_stride=layout.itemsize,
        head_stride=room[0],
        token_stride=room[1],
        block_stride=room[2],
        kv_stride=room[3],
        layer_stride=room[4],
        offset=0,
        offsets=(),
    )


# Changes of a layout's fields, and the words of the difference.
_CLAIMS: dict[str, tuple[str, Callable[[KVLayout], KVLayout]]] = {
    "dtype": ("dtype", lambda it: replace(it, dtype="elsewhere")),
    "head_dim": ("head_dim", wider_heads),
    "total_heads": ("heads of the model", lambda it: replace(it, total_heads=it.total_heads + 1)),
    "total_layers": ("layers of the model", lambda it: replace(it, total_layers=it.total_layers + 1)),
    "model": ("model", lambda it: replace(it, model="another")),
    "group": ("group", lambda it: replace(it, group="sliding")),
}


@pytest.mark.parametrize("count", parts(0.02), ids=str)
def test_caches_of_two_models_are_told_apart_by_the_field(count: int) -> None:
    @examples(count)
    @given(transfers(max_tokens=4), st.sampled_from(list(_CLAIMS)), st.booleans())
    def check(example: Example, field: str, swapped: bool) -> None:
        src = replace(example.src, model="one", group="full")
        dst = replace(example.dst, model="one", group="full")
        assert differences(src, dst) == []
        assert differences(replace(src, model=""), replace(dst, group="")) == []
        words, change = _CLAIMS[field]
        other = change(dst)
        ends = (other, src) if swapped else (src, other)
        found = differences(*ends)
        assert len(found) == 1, found
        assert words in found[0]
        with pytest.raises(UsageError) as caught:
            compile_program(*ends)
        assert caught.value.code == "layout-mismatch"
        assert found[0] in str(caught.value)

    check()


@pytest.mark.parametrize("count", parts(0.02), ids=str)
def test_footprint_is_each_byte_of_a_block_once(count: int) -> None:
    @examples(count)
    @given(transfers(ranges=False))
    def check(example: Example) -> None:
        layout = example.dst
        loops = footprint(layout)
        for name in ("offset", "layer_stride", "block_stride", "unit_stride", "strides"):
            np.testing.assert_array_equal(loops[f"src_{name}"], loops[f"dst_{name}"])
        touched = np.zeros(extent(layout), np.int64)
        for loop in loops:
            for layer in range(int(loop["num_layers"])):
                i, j = np.indices(loop["counts"], np.int64)
                for block in range(layout.num_blocks):
                    first = (
                        int(loop["dst_offset"])
                        + layer * int(loop["dst_layer_stride"])
                        + block * int(loop["dst_block_stride"])
                        + i * int(loop["dst_strides"][0])
                        + j * int(loop["dst_strides"][1])
                    )
                    np.add.at(touched, first[..., None] + np.arange(int(loop["nbytes"])), 1)
        mine = np.zeros(extent(layout), np.int64)
        blocks = [b for b in range(layout.num_blocks) for _ in range(layout.block_tokens)]
        slots = list(range(layout.block_tokens)) * layout.num_blocks
        mine[byte_offsets(layout, blocks, slots)] = 1
        if wrong := first_difference("footprint", layout, [], touched, mine):
            pytest.fail(f"{wrong}{example!r}")
        assert layout.nbytes == extent(layout)

    check()


@pytest.mark.parametrize("count", parts(0.03), ids=str)
def test_layout_survives_the_wire(count: int) -> None:
    @examples(count)
    @given(transfers(max_tokens=4))
    def check(example: Example) -> None:
        for layout in (example.src, example.dst):
            assert KVLayout.from_bytes(layout.to_bytes()) == layout

    check()


@pytest.mark.parametrize("count", parts(0.04), ids=str)
def test_layout_from_damaged_bytes_raises_words_alone(count: int) -> None:
    @examples(count)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        encoded = bytearray(data.draw(transfers(max_tokens=4)).src.to_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(encoded) - 1))
            encoded[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
        words = ""
        try:
            layout = KVLayout.from_bytes(bytes(encoded))
        except UsageError as error:
            words = str(error)
        else:
            assert KVLayout.from_bytes(layout.to_bytes()) == layout
        assert len(words) < 2000

    check()
