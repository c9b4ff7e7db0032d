"""Whether strided sets of bytes overlap: decided from their strides, never byte by byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

# Limit of steps of one check. A cache whose scales lie in its pages takes about ten steps for each listed
# offset, and a layout lists at most 8192. Strides that need more steps were made to waste time.
_MAX_STEPS = 200_000


@dataclass(frozen=True, slots=True)
class Strided:
    """A run of bytes, repeated along nested axes.

    Attributes
    ----------
    start
        Byte at which the first run begins.
    nbytes
        Bytes of a run.
    axes
        (count, stride), the longest stride first. Each stride is at least as long as everything inside it.
    """

    start: int
    nbytes: int
    axes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, start: int, nbytes: int, axes: Sequence[tuple[int, int]]) -> Strided:
        """Makes one from axes in any order; axes without gaps between their steps become part of the run."""
        outer: list[tuple[int, int]] = []
        for count, stride in sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: axis[1]):
            if not outer and stride == nbytes:
                nbytes *= count
            elif outer and stride == outer[-1][0] * outer[-1][1]:
                outer[-1] = (outer[-1][0] * count, outer[-1][1])
            else:
                outer.append((count, stride))
        return cls(start, nbytes, tuple(reversed(outer)))

    @property
    def extent(self) -> int:
        """Bytes from the first to the end of the last run."""
        return self.nbytes + sum((count - 1) * stride for count, stride in self.axes)

    def inner(self, steps: int) -> Strided:
        """Returns the subset at one step of the outermost axis."""
        return replace(self, start=self.start + steps * self.axes[0][1], axes=self.axes[1:])


def share_a_byte(starts: NDArray[np.int64], one: Strided, other: Strided) -> bool:
    """Returns whether `one`, placed at any of `starts`, shares a byte with `other`.

    Axes of equal stride are compared by the distance of their steps, so a check takes a few steps for any
    number of blocks. Sets that would need 200,000 steps count as sharing.
    """
    low, high = other.start - one.extent, other.start + other.extent
    near = starts[(starts > low) & (starts < high)]
    steps = iter(range(_MAX_STEPS))
    return any(_meet(replace(one, start=int(start)), other, steps) for start in near)


def _meet(one: Strided, other: Strided, steps: Iterator[int]) -> bool:
    if one.start + one.extent <= other.start or other.start + other.extent <= one.start:
        return False
    if next(steps, None) is None or not (one.axes or other.axes):
        return True
    if one.axes and other.axes and one.axes[0][1] == other.axes[0][1]:
        # Whether step i of one meets step j of the other depends only on i - j.
        (count, stride), (other_count, _) = one.axes[0], other.axes[0]
        inner = other.inner(0)
        return any(
            _meet(one.inner(distance), inner, steps)
            for distance in _near(one.inner(0), stride, inner, 1 - other_count, count - 1)
        )
    if not one.axes or (other.axes and other.axes[0][1] > one.axes[0][1]):
        one, other = other, one
    count, stride = one.axes[0]
    return any(_meet(one.inner(i), other, steps) for i in _near(one.inner(0), stride, other, 0, count - 1))


def _near(one: Strided, stride: int, other: Strided, low: int, high: int) -> range:
    """Returns the steps from low to high at which the extents of `one` and `other` overlap."""
    first = (other.start - one.start - one.extent) // stride + 1
    last = -((one.start - other.start - other.extent) // stride) - 1
    return range(max(low, first), min(high, last) + 1)


def overlapping_starts(starts: Sequence[int], one: Strided) -> tuple[int, int] | None:
    """Returns the indices of two of `starts` at which `one` would share a byte, or None.

    Sorts the starts, so it is fast even for thousands. Starts that are interleaved with every axis may be
    refused although they would just fit; no cache is laid out like that.
    """
    at = np.array(starts, np.int64)
    return _clash(at, np.arange(len(at)), one)


def _clash(at: NDArray[np.int64], which: NDArray[np.intp], one: Strided) -> tuple[int, int] | None:
    """Checks sorted starts; `which[i]` is the original index of the start ``at[i]``."""
    order = np.argsort(at, kind="stable")
    at, which = at[order], which[order]
    for part in np.split(np.arange(len(at)), np.flatnonzero(np.diff(at) >= one.extent) + 1):
        if len(part) < 2:
            continue
        pair = (int(which[part[0]]), int(which[part[1]]))
        if not one.axes or at[part[0]] == at[part[1]]:
            return pair
        # Within one step of the outermost axis, two starts clash exactly if they clash modulo that step.
        stride, inner = one.axes[0][1], one.inner(0)
        rest = at[part] % stride
        turn = np.argsort(rest, kind="stable")
        rest, names = rest[turn], which[part][turn]
        gaps = np.diff(rest, append=rest[0] + stride)
        if not (cuts := np.flatnonzero(gaps >= inner.extent)).size:
            return pair
        # Cut the circle behind the first wide gap, so that what follows is a line again.
        cut = int(cuts[0]) + 1
        line = np.concatenate([rest[cut:], rest[:cut] + stride])
        found = _clash(line, np.concatenate([names[cut:], names[:cut]]), inner)
        if found is not None:
            return found
    return None
