"""Conversion of stored numbers between two layouts: the scales of both ends, and what cannot be converted."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvxfer.layout.kv_layout import KVLayout
from kvxfer.layout.quantization import Quantization
from kvxfer.plan.program import CONVERSION_DTYPE
from kvxfer.plan.units import unit_tokens

# The numbers of Conversion.src_dtype and dst_dtype: native/include/kvxfer/number.h.
_DTYPE_NUMBERS: Final = {
    "bfloat16": 1,
    "float16": 2,
    "float32": 3,
    "float8_e4m3fn": 4,
    "float8_e5m2": 5,
    "int8": 6,
}
# From the smallest range to the largest.
_BY_RANGE: Final = ("int8", "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32")
# Types for which a page's scale can be computed from the page's largest number.
_FOUND_SCALES: Final = ("float8_e4m3fn", "float8_e5m2", "int8")

# Where a conversion's scales are: ScalePlace of native/include/kvxfer/copy_program.h.
NO_SCALES: Final = 0
IN_PROGRAM: Final = 1
IN_REGION: Final = 2


class Scales(NamedTuple):
    """Position of one end's scales: that of the first moving layer and head, and the steps from there.

    Counted in floats of the program's table (`IN_PROGRAM`), or in bytes of the region (`IN_REGION`).
    """

    place: int = NO_SCALES
    offset: int = 0
    layer: int = 0
    kv: int = 0
    head: int = 0
    block: int = 0


class Crossing(NamedTuple):
    """How elements of one layout become elements of the other, for some layers and heads.

    Attributes
    ----------
    converts
        Whether elements change; otherwise bytes are copied unchanged.
    src, dst
        Scales that elements are multiplied by (source), and divided by (destination).
    table
        float32: the static scales of both ends.
    moved
        Positions of page scales at both ends, if these scales move as bytes; else None.
    record
        CONVERSION_DTYPE, one element: dtypes, scale places and ``saturate``.
    """

    converts: bool
    src: Scales
    dst: Scales
    table: NDArray[np.float32]
    moved: tuple[Scales, Scales] | None
    record: NDArray[np.void]


def crossing(src: KVLayout, dst: KVLayout, layers: range, heads: range) -> Crossing:
    """Decides how elements are converted, for two layouts without `obstacles`."""
    record = np.zeros(1, CONVERSION_DTYPE)
    if _same_numbers(src, dst, layers, heads):
        moved = None
        if src.quantization is not None and src.quantization.in_memory:
            moved = _page_scales(src, layers, heads), _page_scales(dst, layers, heads)
        return Crossing(False, Scales(), Scales(), np.empty(0, np.float32), moved, record)
    src_scales, src_table = _scales(src, layers, heads, 0)
    dst_scales, dst_table = _scales(dst, layers, heads, len(src_table))
    record["src_dtype"], record["dst_dtype"] = _DTYPE_NUMBERS[src.dtype], _DTYPE_NUMBERS[dst.dtype]
    record["src_scales"], record["dst_scales"] = src_scales.place, dst_scales.place
    record["saturate"] = _saturates(src, dst)
    table = np.concatenate((src_table, dst_table))
    return Crossing(True, src_scales, dst_scales, table, None, record)


def obstacles(src: KVLayout, dst: KVLayout, layers: range, heads: range) -> list[str]:
    """Returns sentences on why numbers of one layout cannot become numbers of the other; [] if they can.

    `layers` and `heads` are those that would move; both may be empty.
    """
    if src.dtype == dst.dtype and src.itemsize != dst.itemsize:
        return [_differ("bytes of an element", src.itemsize, dst.itemsize)]
    if src.dtype != dst.dtype:
        unknown = [dtype for dtype in (src.dtype, dst.dtype) if dtype not in _DTYPE_NUMBERS]
        if unknown:
            return [
                _differ("dtype", src.dtype, dst.dtype)
                + f" ({' and '.join(unknown)} can only be copied as bytes; dtypes that can be converted are "
                f"{', '.join(_DTYPE_NUMBERS)})"
            ]
    found = []
    same = _same_numbers(src, dst, layers, heads)
    for end, layout in (("source", src), ("destination", dst)):
        if not same and layout.dtype == "int8" and layout.quantization is None:
            found.append(
                f"{_differ('quantization', _words(src), _words(dst))}: an int8 code without a scale has no "
                f"value, so {src.dtype} cannot become {dst.dtype}; declare the scales at the {end}, or "
                "int8 without scales at both ends to copy bytes"
            )
    if dst.quantization is not None and dst.quantization.in_memory:
        found += _page_obstacles(src, dst, dst.quantization, heads, same)
    return found


def describe(src: KVLayout, dst: KVLayout, crossing: Crossing) -> str:
    """Returns a sentence, without its full stop, on what happens to the elements."""
    if crossing.moved is not None:
        return "Bytes are copied unchanged, together with the scales of the pages"
    if not crossing.converts:
        return "Bytes are copied unchanged"
    found = " computed on the way" if crossing.dst.place == IN_REGION else ""
    return (
        f"Numbers are converted from {src.dtype} ({_words(src)}) to {dst.dtype} "
        f"({_words(dst)}{found}{', saturating' if _saturates(src, dst) else ''})"
    )


def _saturates(src: KVLayout, dst: KVLayout) -> bool:
    """Returns whether what is too large for the destination's type becomes its largest number.

    A destination without scales of its own has not said. It saturates where numbers may be too large for it,
    since one NaN in a page makes every later token NaN; where none can be, infinities stay.
    """
    if dst.quantization is not None:
        return dst.quantization.saturate
    if src.quantization is not None:
        return dst.dtype != "float32"
    return _BY_RANGE.index(dst.dtype) < _BY_RANGE.index(src.dtype)


def _page_obstacles(
    src: KVLayout, dst: KVLayout, quantization: Quantization, heads: range, same: bool
) -> list[str]:
    """Returns sentences on why the scales of the destination's pages cannot be written."""
    found = []
    if unit_tokens(src, dst) != dst.block_tokens:
        found.append(
            f"tokens of a block: {src.block_tokens} at the source, {dst.block_tokens} at the destination, "
            f"which has a scale for each page and so needs whole pages, not units of {unit_tokens(src, dst)} "
            "tokens"
        )
    if quantization.per == "page" and 0 < len(heads) < dst.num_heads:
        found.append(
            f"heads: {heads[0]} to {heads[-1]} would move, but the destination has one scale for a page of "
            f'its {dst.num_heads} heads: move all of them, or use scales per "page_head"'
        )
    if not same and dst.dtype not in _FOUND_SCALES:
        found.append(
            f"quantization: scales of pages can be computed for {', '.join(_FOUND_SCALES)}, not for "
            f"{dst.dtype}"
        )
    return found


def _same_numbers(src: KVLayout, dst: KVLayout, layers: range, heads: range) -> bool:
    """Returns whether equal bytes mean equal numbers, apart from page scales."""
    if src.dtype != dst.dtype or src.itemsize != dst.itemsize:
        return False
    ours, theirs = src.quantization, dst.quantization
    if ours is None and theirs is None:
        return True
    paged = [side is not None and side.in_memory for side in (ours, theirs)]
    if any(paged):
        return all(paged) and ours is not None and theirs is not None and ours.per == theirs.per
    if src.dtype == "int8" and (ours is None or theirs is None):
        return False
    if not layers or not heads:
        return True
    return np.array_equal(_static(src, layers, heads), _static(dst, layers, heads))


def _scales(layout: KVLayout, layers: range, heads: range, at: int) -> tuple[Scales, NDArray[np.float32]]:
    """Returns the position of an end's scales, and the numbers that it appends to a table of `at` numbers."""
    nothing = np.empty(0, np.float32)
    if layout.quantization is None:
        return Scales(), nothing
    if layout.quantization.in_memory:
        return _page_scales(layout, layers, heads), nothing
    table = _static(layout, layers, heads)
    if table.size == 1 and table.flat[0] == 1 and layout.dtype != "int8":
        return Scales(), nothing  # × 1 and / 1 change nothing
    num_layers, num_kv, num_heads = table.shape
    scales = Scales(
        IN_PROGRAM,
        offset=at,
        layer=num_kv * num_heads if num_layers > 1 else 0,
        kv=num_heads if num_kv > 1 else 0,
        head=1 if num_heads > 1 else 0,
    )
    return scales, table.ravel()


def _page_scales(layout: KVLayout, layers: range, heads: range) -> Scales:
    quantization = layout.quantization
    assert quantization is not None
    return Scales(
        IN_REGION,
        offset=quantization.offset
        + (layers.start - layout.first_layer) * quantization.layer_stride
        + (heads.start - layout.first_head) * quantization.head_stride,
        layer=quantization.layer_stride,
        kv=quantization.kv_stride,
        head=quantization.head_stride,
        block=quantization.block_stride,
    )


def _static(layout: KVLayout, layers: range, heads: range) -> NDArray[np.float32]:
    """Returns the scales of some layers and heads, [layers, kv, heads].

    An axis along which the scales are equal has one element. So the steps follow the numbers and not the
    declared granularity: runs merge, and loops are shared.
    """
    table = np.ones((1, 1, 1), np.float32)
    if layout.quantization is not None:
        first_layer, first_head = layers.start - layout.first_layer, heads.start - layout.first_head
        table = layout.quantization.table(layout.num_layers, layout.num_kv, layout.num_heads)[
            first_layer : first_layer + len(layers), :, first_head : first_head + len(heads)
        ]
    for axis in range(3):
        first = table.take([0], axis)
        if table.shape[axis] > 1 and bool((table == first).all()):
            table = first
    return table


def _words(layout: KVLayout) -> str:
    return "no scales" if layout.quantization is None else f"scales per {layout.quantization.per}"


def _differ(what: str, ours: object, theirs: object) -> str:
    return f"{what}: {ours} at the source, {theirs} at the destination"
