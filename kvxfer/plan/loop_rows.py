"""Nests of loops -> the records of a copy program, one row for each stretch of regular layers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvxfer.plan.conversion import Crossing
from kvxfer.plan.loop_nest import Axis, Nest, nest, num_unrolled, regular_stretches
from kvxfer.plan.program import CONVERSION_DTYPE, LOOP_DTYPE


class Strand(NamedTuple):
    """The layers of K, of V, or of both: where the first run of block 0 lies in each of them.

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
    """Bytes from one block, and from one unit of a block, to the next."""

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
        """Loops for each stretch; 0 where scales cannot be found by whole granules."""
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
    """Makes K and V an axis where they lie equally far apart in every layer, else two strands.

    `src` and `dst` are [num_layers, num_kv]. Strides are unsigned, so an axis starts at the lower
    one; both ends must agree which that is, and scales, which start at K, where they differ.
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
    """Returns the loops of all parts, ascending in their first layer, and their conversions.

    `first_layer` is what the first layer that moves is called at the destination.
    """
    made = [
        _part_rows(part, nest(part.elements, part.axes, part.whole_granules), strand, how)
        for part in parts
        for strand in part.strands
    ]
    loops = np.concatenate([rows for rows, _ in made])
    # In the order of layers, so that an executor that stops at a layer's last loop may.
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
    """Returns loops and where their scales are, [num_stretches × num_starts] each."""
    firsts, counts = strand.firsts[:, None], strand.counts[:, None]
    second = firsts + (counts > 1)  # the same layer where a stretch has no other
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
    """Returns each conversion once, and for each loop its number from 1."""
    if bool((operands == operands[0]).all()):
        return operands[:1].copy(), np.ones(len(operands), np.uint32)
    # As plain bytes: records have no order of their own.
    raw = operands.view(f"V{CONVERSION_DTYPE.itemsize}")
    distinct, which = np.unique(raw, return_inverse=True)
    return distinct.view(CONVERSION_DTYPE), (which + 1).astype(np.uint32)
