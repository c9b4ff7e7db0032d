"""What a GPU's lanes move: the header that the kernels compile, in its host build, against numpy.

The kernels themselves run the same header; tests/native/test_gpu_copy.cpp has them move bytes.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvxfer import _native
from kvxfer.plan.compile import compile_program
from kvxfer.plan.program import CONVERSION_DTYPE, LOOP_DTYPE
from tests.property.interpreter import Pairs, program_map, units
from tests.property.oracle import common_layers, extent
from tests.property.strategies import NUM_EXAMPLES, Example, examples, parts, transfers
from tests.property.test_plan import draw_window, pairs_of, require_map

pytestmark = pytest.mark.timeout(0 if NUM_EXAMPLES > 100_000 else 300)

Rows = NDArray[np.int64]
COPY_VECTORS, COPY_BULK = 0, 1
NO_CONVERSIONS = np.zeros(0, CONVERSION_DTYPE), np.zeros(0, np.float32)


def byte_map(rows: Rows, dst_nbytes: int) -> tuple[Rows, Rows]:
    """Returns what `program_map` does, from atoms."""
    src, dst, nbytes = rows.T
    within = np.arange(nbytes.sum()) - np.repeat(np.cumsum(nbytes) - nbytes, nbytes)
    to = np.repeat(dst, nbytes) + within
    origin = np.full(dst_nbytes, -1, np.int64)
    origin[to] = np.repeat(src, nbytes) + within
    return origin, np.bincount(to, minlength=dst_nbytes).astype(np.int64)


@pytest.mark.parametrize("count", parts(0.05), ids=str)
def test_atoms_of_two_layouts_are_every_byte_once(count: int) -> None:
    @examples(count)
    @given(transfers(), st.booleans(), st.data())
    def check(example: Example, fine: bool, data: st.DataObject) -> None:
        src, dst = example.src, example.dst
        layers = draw_window(data.draw, common_layers(src, dst))
        pairs = pairs_of(example)
        program = compile_program(src, dst, heads=example.heads, fine=fine or pairs.num_fine > 0)
        numbered = range(layers[0] - dst.first_layer, layers[-1] + 1 - dst.first_layer)
        rows = _native.gpu_atoms(
            program.num_program_layers,
            program.loops,
            *NO_CONVERSIONS,
            units(program),
            (numbered.start, len(numbered)),
            pairs.src_ids,
            pairs.dst_ids,
            pairs.num_fine,
            # The address of memory decides how wide vectors are, and nothing else.
            data.draw(st.sampled_from([0, 1, 2, 4, 8, 16])),
            0,
            data.draw(st.booleans()),
        ).astype(np.int64)
        require_map(
            example,
            *byte_map(rows[:, 1:], extent(dst)),
            program_map(program, numbered, pairs, extent(dst))[0],
        )

    check()


def touching_joined(rows: Rows) -> Rows:
    """Returns rows of (src, dst, nbytes) in order, those joined that go on at both sides."""
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    ends = rows[:-1, :2] + rows[:-1, 2:]
    starts = np.concatenate([[True], (rows[1:, :2] != ends).any(axis=1)])
    first = np.flatnonzero(starts)
    return np.column_stack([rows[first, :2], np.add.reduceat(rows[:, 2], first)])


@st.composite
def loops(draw: st.DrawFn, alignment: int) -> tuple[NDArray[np.void], Pairs]:
    """Draws a loop of any sizes, as a program of large pages has them, whose runs lie apart."""
    record = np.zeros(1, LOOP_DTYPE)
    count = st.integers(1, 4)
    num_layers, num_pairs, rows, columns = draw(count), draw(count), draw(count), draw(count)
    nbytes = alignment * draw(st.integers(1, 3000))
    record["num_layers"], record["counts"], record["nbytes"] = num_layers, (rows, columns), nbytes
    for side in ("src", "dst"):
        step = nbytes
        for field, times in (
            ("strides", columns),
            ("strides", rows),
            ("block_stride", 8),
            ("layer_stride", 4),
        ):
            step += alignment * draw(st.integers(1, 3))
            if field == "strides":
                record[f"{side}_strides"][
                    0, int(times == columns and record[f"{side}_strides"][0, 1] == 0)
                ] = step
            else:
                record[f"{side}_{field}"] = step
            step *= times
        record[f"{side}_offset"] = alignment * draw(st.integers(0, 100))
    ids = [draw(st.permutations(range(8)))[:num_pairs] for _ in range(2)]
    return record, Pairs(np.array(ids[0], np.uint32), np.array(ids[1], np.uint32), 0)


def runs_of(loop: np.void, pairs: Pairs) -> Rows:
    """Returns (src, dst, nbytes) of every run, by the formula of the format."""
    layer, pair, i, j = np.meshgrid(
        np.arange(loop["num_layers"]),
        np.arange(len(pairs.src_ids)),
        np.arange(loop["counts"][0]),
        np.arange(loop["counts"][1]),
        indexing="ij",
    )
    places = [
        int(loop[f"{side}_offset"])
        + layer * int(loop[f"{side}_layer_stride"])
        + ids[pair].astype(np.int64) * int(loop[f"{side}_block_stride"])
        + i * int(loop[f"{side}_strides"][0])
        + j * int(loop[f"{side}_strides"][1])
        for side, ids in (("src", pairs.src_ids), ("dst", pairs.dst_ids))
    ]
    return np.column_stack([*(place.ravel() for place in places), np.full(layer.size, int(loop["nbytes"]))])


@pytest.mark.parametrize("count", parts(0.05), ids=str)
def test_atoms_of_large_runs_are_the_runs_of_the_formula(count: int) -> None:
    @examples(count)
    @given(st.sampled_from([1, 2, 4, 8, 16, 16]), st.booleans(), st.data())
    def check(alignment: int, bulk: bool, data: st.DataObject) -> None:
        records, pairs = data.draw(loops(alignment))
        note(f"{records}")
        rows = _native.gpu_atoms(
            int(records["num_layers"][0]),
            records,
            *NO_CONVERSIONS,
            (1, 1, 0, 0),
            (0, int(records["num_layers"][0])),
            pairs.src_ids,
            pairs.dst_ids,
            0,
            0,
            0,
            bulk,
        ).astype(np.int64)
        assert np.array_equal(touching_joined(rows[:, 1:]), touching_joined(runs_of(records[0], pairs)))

        kernels = set(rows[:, 0].tolist())
        if bulk and alignment == 16 and records["nbytes"][0] >= 2048:
            assert kernels == {COPY_BULK}
        if kernels == {COPY_BULK}:
            assert bulk
            assert records["nbytes"][0] >= 2048
            # What the instruction demands, and what a stage holds.
            assert not (rows[:, 1:] % 16).any()
            assert rows[:, 3].max() <= 16 * 1024
        else:
            assert kernels == {COPY_VECTORS}
            width = rows[:, 3].max()
            assert width == rows[:, 3].min()
            assert alignment <= width <= 16
            assert not (rows[:, 1:3] % width).any()

    check()


def test_a_part_that_a_kernel_cannot_count_is_refused() -> None:
    record = np.zeros(1, LOOP_DTYPE)
    record["num_layers"], record["counts"], record["nbytes"] = 1, (1, 1), (1 << 31) + 1
    record["src_block_stride"] = record["dst_block_stride"] = 1 << 33
    ids = np.zeros(1, np.uint32)
    with pytest.raises(_native.NativeError, match="more than 1073741824 bytes of a pair"):
        _native.gpu_atoms(1, record, *NO_CONVERSIONS, (1, 1, 0, 0), (0, 1), ids, ids, 0, 0, 0, False)
