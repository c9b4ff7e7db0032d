"""A pair of layouts -> copy program. Pure: no I/O, no clock, numpy only.

How a program is numbered
-------------------------
Public calls number layers model-wide (`KVLayout.first_layer` counts in the same), because the two
ends may hold different slices and only the model's numbers mean the same at both. The native core
numbers the layers of a program, of a transfer and of an expectation as the **destination region**
does: its layer 0 is ``dst.first_layer``. So two sources that each send half of the layers into one
region count towards the same expectation without a translation. Where source and destination hold
the same layers, as usual, this is also "minus the first common layer".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import UsageError
from kvxfer.layout import KVLayout

# native/include/kvxfer/copy_program.h: CopyLoop.
LOOP_DTYPE: Final = np.dtype(
    [
        ("first_layer", "<u4"),
        ("num_layers", "<u4"),
        ("src_offset", "<u8"),
        ("dst_offset", "<u8"),
        ("src_layer_stride", "<u8"),
        ("dst_layer_stride", "<u8"),
        ("src_block_stride", "<u8"),
        ("dst_block_stride", "<u8"),
        ("counts", "<u4", (2,)),
        ("src_strides", "<u8", (2,)),
        ("dst_strides", "<u8", (2,)),
        ("nbytes", "<u8"),
        ("op", "<u4"),
        ("reserved", "<u4"),
    ]
)

# native/core/wire.h: kMaxLoops.
MAX_LOOPS: Final = 8192


@dataclass(frozen=True, slots=True)
class CopyProgram:
    """Which bytes of a block pair go where, for every layer that both ends hold.

    Attributes
    ----------
    loops
        LOOP_DTYPE [num_loops], read-only; layers numbered as the destination region's.
    num_program_layers
        Layers of the destination region; those outside `layers` have no loop.
    origin
        Model-wide number of program layer 0: the destination's first layer.
    layers
        The common layers, numbered model-wide.
    """

    loops: NDArray[np.void]
    num_program_layers: int
    origin: int
    layers: range

    @property
    def pair_nbytes(self) -> int:
        """Bytes that one block pair moves in one layer; the same for every common layer."""
        return self._layer_sum(self.loops["nbytes"].astype(np.int64) * self._runs())

    @property
    def runs_per_pair(self) -> int:
        """Contiguous runs of one block pair in one layer, before runs of adjacent blocks merge."""
        return self._layer_sum(self._runs())

    @property
    def smallest_run_nbytes(self) -> int:
        """Bytes of the shortest contiguous run: what a rail that charges per piece will feel."""
        return int(self.loops["nbytes"].min())

    def explain(self) -> str:
        """Returns a few sentences with numbers: what moves, in how many runs, what merged."""
        first, last = self.layers[0], self.layers[-1]
        one_loop = bool(np.all(self.loops["num_layers"] == len(self.layers)))
        merged = bool(
            np.all(self.loops["counts"] == 1)
            and np.all(self.loops["nbytes"] == self.loops["src_block_stride"])
            and np.all(self.loops["nbytes"] == self.loops["dst_block_stride"])
        )
        return (
            f"{len(self.loops)} loop{'s' if len(self.loops) > 1 else ''} for layers {first} to {last} "
            f"({len(self.layers)} of the {self.num_program_layers} at the destination). "
            f"A block pair of one layer moves {self.pair_nbytes} bytes in {self.runs_per_pair} "
            f"run{'s' if self.runs_per_pair > 1 else ''}, the smallest of {self.smallest_run_nbytes} bytes. "
            + (
                "All layers share their loops"
                if one_loop
                else "Layers lie irregularly and need loops of their own"
            )
            + ("; adjacent blocks merge into longer runs." if merged else "; adjacent blocks stay apart.")
        )

    def window(self, layers: Iterable[int] | None) -> tuple[int, int]:
        """Returns ``(first, count)`` in the program's numbers for model-wide `layers`.

        Parameters
        ----------
        layers
            Consecutive ascending layer numbers (a range, or a list); None for all common layers.

        Raises
        ------
        UsageError
            ``invalid-argument`` when they are not consecutive, ``out-of-range`` when one of the
            two ends does not hold one of them.
        """
        wanted = self.layers if layers is None else consecutive(layers)
        if wanted[0] < self.layers[0] or wanted[-1] > self.layers[-1]:
            raise UsageError(
                f"layers {wanted[0]} to {wanted[-1]} were named, both ends hold "
                f"{self.layers[0]} to {self.layers[-1]} (numbered model-wide)",
                code="out-of-range",
            )
        return wanted[0] - self.origin, len(wanted)

    def _runs(self) -> NDArray[np.int64]:
        counts = self.loops["counts"].astype(np.int64)
        return np.asarray(counts[:, 0] * counts[:, 1])

    def _layer_sum(self, values: NDArray[np.int64]) -> int:
        first = self.loops["first_layer"].astype(np.int64)
        layer = self.layers[0] - self.origin
        held = (first <= layer) & (layer < first + self.loops["num_layers"])
        return int(values[held].sum())


def consecutive(layers: Iterable[int]) -> range:
    """Returns `layers` as a range, or raises ``UsageError`` when they are empty or have gaps."""
    if not isinstance(layers, range) or layers.step != 1:
        items = [int(layer) for layer in layers]
        layers = range(items[0], items[-1] + 1) if items else range(0)
        if items != list(layers):
            raise UsageError(
                "layers of one transfer are consecutive and ascending: post one transfer for each run",
                code="invalid-argument",
            )
    if not layers:
        raise UsageError("no layers were named: leave layers out for all", code="invalid-argument")
    return layers


def compile(src: KVLayout, dst: KVLayout) -> CopyProgram:
    """Compiles the program that copies blocks of `src` to blocks of `dst`.

    Layers are intersected; everything else that says what a byte means must be equal, while
    strides and offsets may differ in any way. Layers are the outermost loop, block pairs the
    next, then at most two strided axes around a contiguous run. Axes that touch on both sides are
    merged; what does not fit in two axes is unrolled, the shortest first. Milliseconds at most:
    compile once for each pair of regions.

    Raises
    ------
    UsageError
        ``layout-mismatch``, naming every field that differs, or when the layouts are so irregular
        that the program would exceed 8192 loops.
    """
    layers = _common_layers(src, dst)
    src_table = src.layer_offsets()[layers.start - src.first_layer :][: len(layers)]
    dst_table = dst.layer_offsets()[layers.start - dst.first_layer :][: len(layers)]
    axes = [
        (src.block_tokens, src.token_stride, dst.token_stride),
        (src.num_heads, src.head_stride, dst.head_stride),
        (src.head_dim, src.dim_stride, dst.dim_stride),
    ]
    groups, kv_axis = _kv_groups(src_table, dst_table)
    axes += kv_axis
    nbytes, axes = _merge(src.itemsize, axes)
    num_stretches = sum(1 for group in groups for _ in _regular_stretches(*group))
    unrolled = math.prod(sorted(count for count, _, _ in axes)[:-2])
    if num_stretches * unrolled > MAX_LOOPS:
        raise UsageError(
            f"the copy program would need {num_stretches * unrolled} loops ({num_stretches} irregular "
            f"stretches of layers × {unrolled}), the bound is {MAX_LOOPS}: allocate the layers in one "
            "tensor at one end at least",
            code="layout-mismatch",
        )
    nest, starts = _nest(axes)
    rows: list[NDArray[np.void]] = []
    for src_offsets, dst_offsets in groups:
        for first, count in _regular_stretches(src_offsets, dst_offsets):
            last = first + min(count, 2) - 1
            loop = np.zeros((), LOOP_DTYPE)
            loop["first_layer"] = layers.start - dst.first_layer + first
            loop["num_layers"] = count
            loop["src_layer_stride"] = src_offsets[last] - src_offsets[first]
            loop["dst_layer_stride"] = dst_offsets[last] - dst_offsets[first]
            loop["src_block_stride"] = src.block_stride
            loop["dst_block_stride"] = dst.block_stride
            loop["counts"] = [count for count, _, _ in nest]
            loop["src_strides"] = [stride for _, stride, _ in nest]
            loop["dst_strides"] = [stride for _, _, stride in nest]
            loop["nbytes"] = nbytes
            for src_start, dst_start in starts:
                row = loop.copy()
                row["src_offset"] = src_offsets[first] + src_start
                row["dst_offset"] = dst_offsets[first] + dst_start
                rows.append(row)
    loops = np.array(rows, LOOP_DTYPE)
    # In the order of layers, so that an executor that stops at a layer's last loop may.
    loops = loops[np.argsort(loops["first_layer"], kind="stable")]
    loops.flags.writeable = False
    return CopyProgram(loops=loops, num_program_layers=dst.num_layers, origin=dst.first_layer, layers=layers)


def footprint(layout: KVLayout) -> NDArray[np.void]:
    """Returns the loops that say which bytes block 0 of each layer owns (both halves are equal)."""
    return compile(layout, layout).loops


_Axis = tuple[int, int, int]  # count, src stride, dst stride


def _common_layers(src: KVLayout, dst: KVLayout) -> range:
    differences = [
        f"{words}: {ours} at the source, {theirs} at the destination"
        for words, ours, theirs in (
            ("dtype", src.dtype, dst.dtype),
            ("bytes of an element", src.itemsize, dst.itemsize),
            ("tokens of a block", src.block_tokens, dst.block_tokens),
            ("keys and values", _kv_words(src), _kv_words(dst)),
            ("head_dim", src.head_dim, dst.head_dim),
            ("heads", _head_words(src), _head_words(dst)),
            ("layers of the model", src.total_layers, dst.total_layers),
        )
        if ours != theirs
    ]
    layers = range(max(src.layers.start, dst.layers.start), min(src.layers.stop, dst.layers.stop))
    if not layers:
        differences.append(
            f"no layer is common: {src.layers[0]} to {src.layers[-1]} at the source, "
            f"{dst.layers[0]} to {dst.layers[-1]} at the destination"
        )
    if differences:
        raise UsageError(
            "no copy program leads from one layout to the other: " + "; ".join(differences),
            code="layout-mismatch",
        )
    return layers


def _kv_words(layout: KVLayout) -> str:
    return "told apart" if layout.num_kv == 2 else 'one (latent; write axis "c" for keys then values)'


def _head_words(layout: KVLayout) -> str:
    return f"{layout.first_head} to {layout.first_head + layout.num_heads - 1} of {layout.total_heads}"


def _kv_groups(
    src: NDArray[np.int64], dst: NDArray[np.int64]
) -> tuple[list[tuple[NDArray[np.int64], NDArray[np.int64]]], list[_Axis]]:
    """Makes K and V an axis where they lie equally far apart in every layer, else two groups.

    Strides are unsigned, so an axis starts at the lower one; both ends must agree which that is.
    """
    if src.shape[1] == 1:
        return [(src[:, 0], dst[:, 0])], []
    src_gap, dst_gap = src[:, 1] - src[:, 0], dst[:, 1] - dst[:, 0]
    regular = bool(np.all(src_gap == src_gap[0]) and np.all(dst_gap == dst_gap[0]))
    if regular and (src_gap[0] > 0) == (dst_gap[0] > 0):
        lower = 0 if src_gap[0] > 0 else 1
        axis = (2, abs(int(src_gap[0])), abs(int(dst_gap[0])))
        return [(src[:, lower], dst[:, lower])], [axis]
    return [(src[:, kv], dst[:, kv]) for kv in (0, 1)], []


def _merge(itemsize: int, axes: list[_Axis]) -> tuple[int, list[_Axis]]:
    """Joins axes that follow each other without a gap on both sides; returns the contiguous run."""
    nbytes = itemsize
    left = sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: (axis[2], axis[1]))
    merged = True
    while merged:
        merged = False
        for axis in left:
            if axis[1] == nbytes and axis[2] == nbytes:
                nbytes *= axis[0]
                left.remove(axis)
                merged = True
                break
        for inner in left:
            for outer in left:
                if (
                    inner is not outer
                    and inner[0] * outer[0] < 1 << 32  # a loop counts in 32 bits
                    and all(outer[side] == inner[0] * inner[side] for side in (1, 2))
                ):
                    left[left.index(inner)] = (inner[0] * outer[0], inner[1], inner[2])
                    left.remove(outer)
                    merged = True
                    break
            if merged:
                break
    return nbytes, left


def _nest(axes: list[_Axis]) -> tuple[list[_Axis], list[tuple[int, int]]]:
    """Returns the two axes to loop over (outer, inner) and the starts of what is unrolled."""
    by_count = sorted(axes, key=lambda axis: -axis[0])
    # The destination is written, and writes gain most from going upwards: its far axis is outside.
    nest = sorted(by_count[:2], key=lambda axis: -axis[2])
    starts = [(0, 0)]
    for count, src_stride, dst_stride in sorted(by_count[2:], key=lambda axis: -axis[2]):
        starts = [(src + i * src_stride, dst + i * dst_stride) for src, dst in starts for i in range(count)]
    return [(1, 0, 0)] * (2 - len(nest)) + nest, starts


def _regular_stretches(src: NDArray[np.int64], dst: NDArray[np.int64]) -> Iterable[tuple[int, int]]:
    """Yields ``(first, count)``: stretches of layers with one stride, upwards, on both sides."""
    first = 0
    while first < len(src):
        count = 1
        if first + 1 < len(src):
            src_stride, dst_stride = src[first + 1] - src[first], dst[first + 1] - dst[first]
            if src_stride >= 0 and dst_stride >= 0:
                steps = (np.diff(src[first:]) == src_stride) & (np.diff(dst[first:]) == dst_stride)
                count = 1 + int(steps.argmin() if not steps.all() else len(steps))
        yield first, count
        first += count
