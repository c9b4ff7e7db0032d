"""Axes of a pair of units -> a contiguous run within two loops, and what is unrolled around them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Axis(NamedTuple):
    """One axis that both ends step along: bytes at either end, and steps through their scales."""

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
        The axes to loop over; of one element where there is nothing to loop over.
    starts
        int64 [num_starts, 4]: where each unrolled loop begins, in the order of `Axis.strides`.
    """

    elements: int
    outer: Axis
    inner: Axis
    starts: NDArray[np.int64]


_NOTHING = Axis(1, 0, 0)


def merge(axes: list[Axis], src_itemsize: int, dst_itemsize: int) -> tuple[int, list[Axis]]:
    """Joins axes that follow each other without a gap on both sides.

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
    """Returns how many loops `nest` makes of merged axes; 0 where they cannot be whole granules."""
    if whole_granules and sum(axis.dst_scale == 0 for axis in axes) > 2:
        return 0
    return math.prod(axis.num for axis in _by_need(axes, whole_granules)[2:])


def nest(elements: int, axes: list[Axis], whole_granules: bool) -> Nest:
    """Chooses the two axes to loop over; the others, the shortest, are unrolled.

    `whole_granules`: the destination's scales are found from all runs that share one, so an axis
    along which they stay must not be unrolled. For axes of which `num_unrolled` is not 0.
    """
    by_need = _by_need(axes, whole_granules)
    # The source is read in one sweep where it can be: processors fetch ahead of a sweep by themselves,
    # while stores of whole lines past the cache are as fast in any order (native/DESIGN.md).
    chosen = sorted(by_need[:2], key=lambda axis: -axis.src)
    outer, inner = [_NOTHING] * (2 - len(chosen)) + chosen
    starts = np.zeros((1, 4), np.int64)
    for axis in sorted(by_need[2:], key=lambda axis: -axis.src):
        steps = np.arange(axis.num, dtype=np.int64)[:, None] * np.array(axis.strides, np.int64)
        starts = (starts[:, None, :] + steps).reshape(-1, 4)
    return Nest(elements, outer, inner, starts)


def regular_stretches(src: list[int], dst: list[int]) -> tuple[list[int], list[int]]:
    """Cuts layers into stretches that have one stride, upwards, on both sides: firsts and counts.

    Scales need no stretches of their own: they are regular over all layers of a rank.
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
