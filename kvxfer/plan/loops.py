"""Makes the loops of a copy program from the axes of a pair of units.

First the axes of one pair become a *nest*: a contiguous run within two loops, with further axes unrolled
around them. Then nests become records of the program, one row for each stretch of regular layers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvxfer.plan.conversion import Crossing
from kvxfer.plan.program import CONVERSION_DTYPE, LOOP_DTYPE

# ---- nests ----------------------------------------------------------------------------------------


class Axis(NamedTuple):
    """One axis of both ends: strides in bytes at each end, and steps through each end's scales."""

    num: int
    src: int
    dst: int
    src_scale: int = 0
    dst_scale: int = 0

    @property
    def strides(self) -> tuple[int, int, int, int]:
        return self[1:]


class Nest(NamedTuple):
    """The loops over one pair.

    Attributes
    ----------
    elements
        Elements of the contiguous run.
    outer, inner
        The axes to loop over; an axis of one element if there is nothing to loop over.
    starts
        int64 [num_starts, 4]: the start of each unrolled loop, in the order of `Axis.strides`.
    """

    elements: int
    outer: Axis
    inner: Axis
    starts: NDArray[np.int64]


_NOTHING = Axis(1, 0, 0)


def merge(axes: list[Axis], src_itemsize: int, dst_itemsize: int) -> tuple[int, list[Axis]]:
    """Merges axes that have no gap between them on both sides.

    Returns the elements of a contiguous run, and the axes that are left. All elements of a run
    share their scales, so an axis that steps through scales never becomes part of it.
    """
    elements = 1
    left = sorted((axis for axis in axes if axis.num > 1), key=lambda axis: (axis.dst, axis.src))
    merged = True
    while merged:
        merged = False
        for axis in left:
            if axis.strides == (elements * src_itemsize, elements * dst_itemsize, 0, 0):
                elements *= axis.num
                left.remove(axis)
                merged = True
                break
        for inner, outer in ((a, b) for a in left for b in left if a is not b):
            if (
                inner.num * outer.num < 1 << 32  # a loop counts in 32 bits
                and outer.strides == tuple(inner.num * stride for stride in inner.strides)
            ):
                left[left.index(inner)] = inner._replace(num=inner.num * outer.num)
                left.remove(outer)
                merged = True
                break
    return elements, left


def num_unrolled(axes: list[Axis], whole_granules: bool) -> int:
    """Returns how many loops `nest` makes of merged axes; 0 if the loops cannot cover whole granules."""
    if whole_granules and sum(axis.dst_scale == 0 for axis in axes) > 2:
        return 0
    return math.prod(axis.num for axis in _by_need(axes, whole_granules)[2:])


def nest(elements: int, axes: list[Axis], whole_granules: bool) -> Nest:
    """Chooses two axes to loop over; the others, the shortest, are unrolled.

    With `whole_granules`, each destination scale is computed from all runs that share it, so an axis along
    which the scale stays must not be unrolled. Call it only if `num_unrolled` of the axes is not 0.
    """
    by_need = _by_need(axes, whole_granules)
    # Read the source in one ascending sweep if possible. Processors prefetch for such a sweep, while
    # non-temporal stores of whole lines are as fast in any order (native/DESIGN.md).
    chosen = sorted(by_need[:2], key=lambda axis: -axis.src)
    outer, inner = [_NOTHING] * (2 - len(chosen)) + chosen
    starts = np.zeros((1, 4), np.int64)
    for axis in sorted(by_need[2:], key=lambda axis: -axis.src):
        steps = np.arange(axis.num, dtype=np.int64)[:, None] * np.array(axis.strides, np.int64)
        starts = (starts[:, None, :] + steps).reshape(-1, 4)
    return Nest(elements, outer, inner, starts)


def regular_stretches(src: list[int], dst: list[int]) -> tuple[list[int], list[int]]:
    """Cuts layers into stretches with one ascending stride on both sides; returns their firsts and counts.

    Scales need no stretches: they are regular over all layers of a rank.
    """
    firsts, counts = [], []
    first, num_layers = 0, len(src)
    while first < num_layers:
        stop = first + 1
        if stop < num_layers:
            src_stride, dst_stride = src[stop] - src[first], dst[stop] - dst[first]
            if src_stride >= 0 and dst_stride >= 0:
                stop += 1
                while (
                    stop < num_layers
                    and src[stop] - src[stop - 1] == src_stride
                    and dst[stop] - dst[stop - 1] == dst_stride
                ):
                    stop += 1
        firsts.append(first)
        counts.append(stop - first)
        first = stop
    return firsts, counts


def _by_need(axes: list[Axis], whole_granules: bool) -> list[Axis]:
    return sorted(axes, key=lambda axis: (whole_granules and axis.dst_scale != 0, -axis.num))


# ---- rows -----------------------------------------------------------------------------------------


class Strand(NamedTuple):
    """The layers of K, of V, or of both: the offset of the first run of block 0 in each layer.

    `src` and `dst` are int64 [num_layers]; `src_scale` and `dst_scale` are steps from the first
    scale; layers ``firsts[i]`` to ``firsts[i] + counts[i] - 1`` have one stride on both sides.
    """

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    src_scale: int
    dst_scale: int
    firsts: NDArray[np.int64]
    counts: NDArray[np.int64]


class Steps(NamedTuple):
    """Bytes from one block to the next, and from one unit of a block to the next."""

    block: int
    unit: int


class LoopPart(NamedTuple):
    """The loops of one kind: over units, over single tokens, or over the scales of pages.

    `axes` are merged; `nbytes` is a run's at the source.
    """

    grain: int
    strands: list[Strand]
    elements: int
    axes: list[Axis]
    itemsize: int
    src: Steps
    dst: Steps
    whole_granules: bool = False

    @property
    def num_unrolled(self) -> int:
        """Loops for each stretch; 0 if scales cannot be computed from whole granules."""
        return num_unrolled(self.axes, self.whole_granules)

    @property
    def num_stretches(self) -> int:
        """Stretches of layers, of K and V together."""
        return sum(len(strand.firsts) for strand in self.strands)


def strand(src: NDArray[np.int64], dst: NDArray[np.int64], src_scale: int = 0, dst_scale: int = 0) -> Strand:
    """Makes a strand of offsets [num_layers] on both sides."""
    firsts, counts = regular_stretches(src.tolist(), dst.tolist())
    return Strand(src, dst, src_scale, dst_scale, np.array(firsts, np.int64), np.array(counts, np.int64))


def kv_strands(
    src: NDArray[np.int64], dst: NDArray[np.int64], how: Crossing
) -> tuple[list[Strand], list[Axis]]:
    """Makes K and V one axis if their distance is equal in every layer, else two strands.

    `src` and `dst` are [num_layers, num_kv]. Strides are unsigned, so an axis starts at the lower one of K
    and V. Both ends must have the same one lower. If the scales of K and V differ, it must be K, because
    scales start at K.
    """
    if src.shape[1] == 1:
        return [strand(src[:, 0], dst[:, 0])], []
    src_gaps, dst_gaps = src[:, 1] - src[:, 0], dst[:, 1] - dst[:, 0]
    src_gap, dst_gap = int(src_gaps[0]), int(dst_gaps[0])
    scale_steps = how.src.kv, how.dst.kv
    if (
        (src_gap > 0) == (dst_gap > 0)
        and (src_gap > 0 or scale_steps == (0, 0))
        and bool((src_gaps == src_gap).all() and (dst_gaps == dst_gap).all())
    ):
        lower = 0 if src_gap > 0 else 1
        return [strand(src[:, lower], dst[:, lower])], [Axis(2, abs(src_gap), abs(dst_gap), *scale_steps)]
    return [strand(src[:, kv], dst[:, kv], kv * scale_steps[0], kv * scale_steps[1]) for kv in range(2)], []


def make_rows(
    parts: list[LoopPart], how: Crossing, first_layer: int
) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """Returns the loops of all parts, ascending in their first layer, with their conversions.

    `first_layer` is the destination's number of the first layer that moves.
    """
    made = [
        _part_rows(part, nest(part.elements, part.axes, part.whole_granules), strand, how)
        for part in parts
        for strand in part.strands
    ]
    loops = np.concatenate([rows for rows, _ in made])
    # In the order of layers, so that an executor can stop after a layer's last loop.
    order = np.argsort(loops["first_layer"], kind="stable")
    loops = loops[order]
    loops["first_layer"] += first_layer
    conversions = np.empty(0, CONVERSION_DTYPE)
    if how.converts:
        operands = np.concatenate([rows for _, rows in made])[order]
        for name in ("src_dtype", "dst_dtype", "src_scales", "dst_scales", "saturate"):
            operands[name] = how.record[name]
        conversions, loops["conversion"] = _numbered(operands)
    return loops, conversions


def _part_rows(
    part: LoopPart, loops: Nest, strand: Strand, how: Crossing
) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """Returns loops and the positions of their scales, [num_stretches × num_starts] each."""
    firsts, counts = strand.firsts[:, None], strand.counts[:, None]
    second = firsts + (counts > 1)  # the first layer again if the stretch has only one
    rows = np.zeros((len(firsts), len(loops.starts)), LOOP_DTYPE)
    rows["first_layer"] = firsts
    rows["num_layers"] = counts
    rows["counts"] = loops.outer.num, loops.inner.num
    rows["nbytes"] = loops.elements * part.itemsize
    rows["grain"] = part.grain
    operands = np.zeros(rows.shape, CONVERSION_DTYPE)
    for k, (side, offsets, steps, scale_start, scales) in enumerate(
        (
            ("src", strand.src, part.src, strand.src_scale, how.src),
            ("dst", strand.dst, part.dst, strand.dst_scale, how.dst),
        )
    ):
        rows[f"{side}_offset"] = offsets[firsts] + loops.starts[:, k]
        rows[f"{side}_layer_stride"] = offsets[second] - offsets[firsts]
        rows[f"{side}_block_stride"] = steps.block
        rows[f"{side}_unit_stride"] = steps.unit
        rows[f"{side}_strides"] = loops.outer.strides[k], loops.inner.strides[k]
        if how.converts:
            start = scales.offset + scale_start + loops.starts[:, 2 + k]
            operands[f"{side}_offset"] = start + firsts * scales.layer
            operands[f"{side}_layer_stride"] = (second - firsts) * scales.layer
            operands[f"{side}_block_stride"] = scales.block
            operands[f"{side}_strides"] = loops.outer.strides[2 + k], loops.inner.strides[2 + k]
    return rows.ravel(), operands.ravel()


def _numbered(operands: NDArray[np.void]) -> tuple[NDArray[np.void], NDArray[np.uint32]]:
    """Returns the distinct conversions, and for each loop the number of its conversion, from 1."""
    if bool((operands == operands[0]).all()):
        return operands[:1].copy(), np.ones(len(operands), np.uint32)
    # As plain bytes, because numpy cannot order records.
    raw = operands.view(f"V{CONVERSION_DTYPE.itemsize}")
    distinct, which = np.unique(raw, return_inverse=True)
    return distinct.view(CONVERSION_DTYPE), (which + 1).astype(np.uint32)
