"""The contents of a page, and the layout of slabs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvxfer import KVLayout, Quantization
from kvxfer.control.host_pool.page_layout import layout_digest, page_nbytes, pool_layout
from kvxfer.plan.compile import compile_program, differences

SIZES = {"l": 3, "2": 2, "b": 6, "t": 8, "h": 4, "d": 16}
ORDERS = ("l2bthd", "l2bhtd", "bl2thd", "lbth2d", "b2lhtd", "lb2thd")


def layout(axes: str = "l2bthd", num_blocks: int = 6, **held: Any) -> KVLayout:
    memory = np.zeros([num_blocks if axis == "b" else SIZES[axis] for axis in axes], np.uint16)
    return KVLayout.from_tensor(memory, axes, **held)


def per_layer(axes: str) -> KVLayout:
    return KVLayout.from_tensors(
        [np.zeros([SIZES[axis] for axis in axes], np.uint16) for _ in range(3)], axes
    )


def pairs() -> KVLayout:
    tensors = [tuple(np.zeros((6, 8, 4, 16), np.uint16) for _ in range(2)) for _ in range(3)]
    return KVLayout.from_tensors(tensors, "bthd")


def scaled(axes: str, scale_axes: str) -> KVLayout:
    memory = np.zeros([SIZES[axis] for axis in axes], np.uint8)
    scales = np.zeros([SIZES[axis] for axis in scale_axes], np.float32)
    return KVLayout.from_tensor(memory, axes, dtype="float8_e4m3fn", scales=scales, scale_axes=scale_axes)


def latent() -> KVLayout:
    return KVLayout.from_tensor(np.zeros((3, 6, 8, 72), np.uint16), "lbtd", total_layers=9, first_layer=3)


def states() -> KVLayout:
    return KVLayout.from_tensor(np.zeros((3, 6, 13), "V3"), "lbd", dtype="opaque")


LAYOUTS = {
    **{axes: layout(axes) for axes in ORDERS},
    "a tensor for each layer": per_layer("2bthd"),
    "keys and values in one row": per_layer("bth2d"),
    "keys and values apart": pairs(),
    "scales of pages": scaled("l2bthd", "l2b"),
    "scales of heads": scaled("bl2thd", "bl2h"),
    "latent": latent(),
    "states": states(),
    "one block": layout(num_blocks=1),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_page_is_one_piece_of_the_slab_and_has_the_same_contents(name: str) -> None:
    source = LAYOUTS[name]
    slab = pool_layout(source, 5)
    assert layout_digest(slab) == layout_digest(source)
    assert not differences(source, slab)
    assert not differences(slab, source)
    scales = (
        0 if slab.quantization is None else 4 * 3 * 2 * (4 if slab.quantization.per == "page_head" else 1)
    )
    assert source.block_nbytes + scales <= page_nbytes(source) < source.block_nbytes + scales + 64
    assert slab.block_stride == page_nbytes(source)
    assert slab.nbytes <= 5 * page_nbytes(source)
    assert pool_layout(slab, 5) == slab
    assert pool_layout(source, 1).num_blocks == 1
    # Between slabs a page is copied in one run (and its scales).
    loops = compile_program(slab, pool_layout(slab, 7)).loops
    assert len(loops) <= 2


@pytest.mark.parametrize(
    ("slab_nbytes", "num_pages"), [(1.0, 1), (1.9, 1), (2.5, 2), (3.2, 2), (4.3, 4), (25.6, 25)], ids=str
)
def test_few_large_pages_fill_a_slab(slab_nbytes: float, num_pages: int) -> None:
    """All slabs have one grid: each loses at most one page, which would extend beyond the slab's end."""
    least = page_nbytes(layout())
    slab = round(slab_nbytes * least) // 256 * 256
    apart = page_nbytes(layout(), slab)
    assert least <= apart <= slab
    for number in range(64):
        begin = number * slab
        inside = (begin + slab) // apart - -(-begin // apart)
        assert inside >= (num_pages if num_pages < 5 else num_pages - 1), number
    assert pool_layout(layout(), 9, apart).block_stride == apart


def test_layouts_of_the_same_contents_have_one_digest() -> None:
    same = [LAYOUTS[name] for name in (*ORDERS, "a tensor for each layer", "keys and values in one row")]
    same += [pairs(), layout(num_blocks=9), layout(null_block=0)]
    assert len({layout_digest(each) for each in same}) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"total_layers": 6},
        {"total_layers": 6, "first_layer": 3},
        {"total_heads": 8},
        {"total_heads": 8, "first_head": 4},
        {"model": "m"},
        {"group": "sliding"},
        {"cp_size": 2},
        {"cp_size": 2, "cp_rank": 1},
        {"cp_size": 2, "cp_interleave": 8},
        {"dtype": "float16", "quantization": Quantization.per_tensor(0.5)},
        {"dtype": "float16", "quantization": Quantization.per_tensor(0.25)},
    ],
    ids=str,
)
def test_other_contents_have_other_digests(change: dict[str, Any]) -> None:
    plain = layout_digest(layout())
    found = layout_digest(layout(**change))
    assert len(found) == 64
    assert found != plain
    if len(change) > 1:
        fewer = dict(list(change.items())[:1])
        assert found != layout_digest(layout(**fewer))


def test_a_digest_is_as_it_was() -> None:
    """Keys of pages outlive a daemon, and are compared across nodes."""
    assert layout_digest(layout()) == "8708e11805c8fb9ea909d129b82d1dbdbce9b980063675e7998692cc36f2586a"
    assert layout_digest(replace(layout(), model="m")) != layout_digest(layout())
