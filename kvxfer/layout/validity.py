"""Checks that a layout is one that a cache can have."""

from __future__ import annotations

import operator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import invalid
from kvxfer.layout.geometry import (
    Geometry,
    block_axes,
    end,
    end_of_elements,
    extent,
    layer_axes,
    scale_axes,
)
from kvxfer.layout.overlap import Strided, overlapping_starts, share_a_byte
from kvxfer.layout.quantization import SCALABLE_NBYTES, SCALE_NBYTES, Quantization

# Bounds for the numbers that a peer sends. Nothing is allocated from these numbers, but their products must
# stay far below 64 bits: an offset is at most _MAX_NBYTES.
_MAX_LAYERS: Final = 4096  # native/core/control/wire.h: kMaxLayers
_MAX_COUNT: Final = (1 << 32) - 1
_MAX_NBYTES: Final = 1 << 56
_MAX_ITEMSIZE: Final = 16
_MAX_DTYPE_NAME: Final = 32
_MAX_NAME: Final = 256
# Most ranks that share the tokens of one sequence. Engines use the ranks of a node or a few.
_MAX_CP_SIZE: Final = 4096

_BOUNDS: Final = (
    ("itemsize", 1, _MAX_ITEMSIZE),
    ("num_blocks", 1, _MAX_COUNT),
    ("block_tokens", 1, _MAX_COUNT),
    ("num_kv", 1, 2),
    ("head_dim", 1, _MAX_COUNT),
    ("num_layers", 1, _MAX_LAYERS),
    ("total_layers", 1, _MAX_LAYERS),
    ("first_layer", 0, _MAX_LAYERS),
    ("num_heads", 1, _MAX_COUNT),
    ("total_heads", 1, _MAX_COUNT),
    ("first_head", 0, _MAX_COUNT),
    ("block_stride", 0, _MAX_NBYTES),
    ("token_stride", 0, _MAX_NBYTES),
    ("head_stride", 0, _MAX_NBYTES),
    ("dim_stride", 0, _MAX_NBYTES),
    ("offset", 0, _MAX_NBYTES),
    ("layer_stride", 0, _MAX_NBYTES),
    ("kv_stride", 0, _MAX_NBYTES),
    ("null_block", -1, _MAX_COUNT),
    ("cp_size", 1, _MAX_CP_SIZE),
    ("cp_rank", 0, _MAX_CP_SIZE),
    ("cp_interleave", 1, _MAX_COUNT),
)
_STRIDES: Final = ("block", "token", "head", "dim", "layer", "kv")


def integers_of(layout: Geometry) -> dict[str, int | tuple[int, ...]]:
    """Returns the numeric fields as Python integers; converts numpy's integers.

    Raises
    ------
    UsageError
        ``invalid-argument``, naming a field that is not an integer.
    """
    found: dict[str, int | tuple[int, ...]] = {}
    name = ""
    try:
        for name, _, _ in _BOUNDS:
            found[name] = operator.index(getattr(layout, name))
        name = "offsets"
        found[name] = tuple(map(operator.index, layout.offsets))
    except TypeError:
        kind = type(getattr(layout, name)).__name__
        wanted = "a tuple of integers" if name == "offsets" else "an integer"
        raise invalid(f"layout field {name} is a {kind}, not {wanted}") from None
    return found


def validate(layout: Geometry) -> None:
    """Refuses impossible numbers, and layouts in which two elements share a byte.

    Raises
    ------
    UsageError
        ``invalid-argument``, naming the axis or field and the numbers.
    """
    _check_names(layout)
    for name, low, high in _BOUNDS:
        value = getattr(layout, name)
        if not low <= value <= high:
            raise invalid(f"layout field {name} is {value}, but must be {low} to {high}")
    nbytes = SCALABLE_NBYTES.get(layout.dtype, layout.itemsize)
    if layout.itemsize != nbytes:
        raise invalid(f"an element of {layout.dtype} has {nbytes} bytes, but itemsize is {layout.itemsize}")
    for what in ("layer", "head"):
        plural = what + "s"
        first, num = getattr(layout, f"first_{what}"), getattr(layout, f"num_{plural}")
        if first + num > (total := getattr(layout, f"total_{plural}")):
            raise invalid(f"{plural} {first} to {first + num - 1} are not within a model of {total} {plural}")
    _check_offsets(layout)
    _check_alignment(layout)
    _check_overlap(layout)
    _check_tokens(layout)
    if layout.quantization is not None:
        _check_quantization(layout)
    if (nbytes := end(layout)) > _MAX_NBYTES:
        raise invalid(f"the layout spans {nbytes} bytes, but the limit is {_MAX_NBYTES}")


def _check_names(layout: Geometry) -> None:
    for name, low, high in (
        ("dtype", 1, _MAX_DTYPE_NAME),
        ("model", 0, _MAX_NAME),
        ("group", 0, _MAX_NAME),
    ):
        value = getattr(layout, name)
        if not isinstance(value, str):
            raise invalid(f"layout field {name} is a {type(value).__name__}, not a name")
        if not low <= len(value) <= high or not value.isprintable():
            raise invalid(
                f"layout field {name} is {value[:64]!a}, but must be {low} to {high} printable letters"
            )
    if not layout.dtype.isascii():
        raise invalid(f"dtype {layout.dtype!a} is not in ASCII letters")


def _check_offsets(layout: Geometry) -> None:
    if not layout.offsets:
        return
    if len(layout.offsets) != layout.num_layers * layout.num_kv:
        wanted = f"{layout.num_layers} layers × {layout.num_kv} kv"
        raise invalid(f"{len(layout.offsets)} offsets are listed, but the layout has {wanted}")
    if layout.offset or layout.layer_stride or layout.kv_stride:
        raise invalid("offsets are listed, so offset, layer_stride and kv_stride must be 0")
    if min(layout.offsets) < 0 or max(layout.offsets) > _MAX_NBYTES:
        raise invalid(f"an offset is not in 0 to {_MAX_NBYTES}")


def _check_alignment(layout: Geometry) -> None:
    item = layout.itemsize
    for axis in _STRIDES:
        if (stride := getattr(layout, f"{axis}_stride")) % item:
            raise invalid(
                f"{axis}s are {stride} bytes apart, which is not a multiple of the {item} bytes of an "
                f"element ({layout.dtype})"
            )
    for offset in layout.offsets or (layout.offset,):
        if offset % item:
            raise invalid(
                f"a layer begins at byte {offset}, which is not a multiple of the {item} bytes of an element "
                f"({layout.dtype})"
            )


def _check_overlap(layout: Geometry) -> None:
    _check_nested(layout.itemsize, block_axes(layout) + layer_axes(layout), "")
    if len(layout.offsets) > 1:
        pair = overlapping_starts(layout.offsets, _strided(0, layout.itemsize, block_axes(layout)))
        if pair is not None:
            first, second = (
                f"layer {index // layout.num_kv} kv {index % layout.num_kv} at byte {layout.offsets[index]}"
                for index in pair
            )
            raise invalid(f"layers overlap: {first} and {second} share bytes")


def _check_nested(nbytes: int, axes: list[tuple[str, int, int]], prefix: str) -> None:
    """Refuses strides that do not nest: each step is at least as long as everything inside it."""
    inside = nbytes
    for name, count, stride in sorted((axis for axis in axes if axis[1] > 1), key=lambda axis: axis[2]):
        if stride < inside:
            raise invalid(
                f"{prefix}{name}s overlap: {stride} bytes from one to the next, but {inside} bytes each"
            )
        inside += (count - 1) * stride


def _check_tokens(layout: Geometry) -> None:
    if layout.null_block >= layout.num_blocks:
        raise invalid(f"null_block is {layout.null_block}, but the blocks are 0 to {layout.num_blocks - 1}")
    if layout.cp_rank >= layout.cp_size:
        raise invalid(
            f"cp_rank is {layout.cp_rank}, but the ranks of cp_size {layout.cp_size} are 0 to "
            f"{layout.cp_size - 1}"
        )
    if layout.cp_size * layout.cp_interleave > _MAX_COUNT:
        raise invalid(
            f"cp_size {layout.cp_size} × cp_interleave {layout.cp_interleave} tokens exceed {_MAX_COUNT}"
        )


def _check_quantization(layout: Geometry) -> None:
    scales = layout.quantization
    if not isinstance(scales, Quantization):
        raise invalid(f"layout field quantization is a {type(scales).__name__}, not a Quantization")
    if layout.dtype not in SCALABLE_NBYTES:
        raise invalid(
            f"elements of dtype {layout.dtype} cannot be scaled ({', '.join(SCALABLE_NBYTES)} can): name the "
            "dtype of the numbers, or leave the quantization out to copy them as bytes"
        )
    if not scales.in_memory:
        scales.table(layout.num_layers, layout.num_kv, layout.num_heads)  # refuses a wrong number
        return
    for name in ("offset", "layer_stride", "kv_stride", "block_stride", "head_stride"):
        value = getattr(scales, name)
        if not 0 <= value <= _MAX_NBYTES:
            raise invalid(f"quantization field {name} is {value}, but must be 0 to {_MAX_NBYTES}")
        if value % SCALE_NBYTES:
            raise invalid(
                f"quantization field {name} is {value}, which is not a multiple of the {SCALE_NBYTES} bytes "
                "of a scale"
            )
    axes = scale_axes(layout)
    _check_nested(SCALE_NBYTES, axes, "scales of ")
    shared = share_a_byte(
        _starts(layout),
        _strided(0, layout.itemsize, block_axes(layout) + layer_axes(layout)),
        _strided(scales.offset, SCALE_NBYTES, axes),
    )
    if shared:
        raise invalid(
            f"scales overlap elements: scales lie in bytes {scales.offset} to "
            f"{scales.offset + extent(SCALE_NBYTES, axes) - 1}, elements in {int(_starts(layout).min())} to "
            f"{end_of_elements(layout) - 1}, and their strides do not separate them (register the scales "
            "with the cache, and read both offsets off the same tensors)"
        )


def _starts(layout: Geometry) -> NDArray[np.int64]:
    return np.array(layout.offsets or (layout.offset,), np.int64)


def _strided(start: int, nbytes: int, axes: list[tuple[str, int, int]]) -> Strided:
    return Strided.of(start, nbytes, [(count, stride) for _, count, stride in axes])
