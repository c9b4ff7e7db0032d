"""Compiles a pair of layouts into a copy program.

The compiler intersects layers and heads, divides pages of different sizes into common units
(kvxfer/plan/units.py), converts elements if dtypes or scales differ (kvxfer/plan/conversion.py), and merges
bytes that are adjacent at both ends into longer runs (kvxfer/plan/loops.py). kvxfer/plan/program.py explains
how the result is numbered.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import UsageError
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.layout.quantization import SCALE_NBYTES
from kvxfer.plan.consecutive import consecutive
from kvxfer.plan.conversion import IN_REGION, Crossing, Scales, crossing, describe, obstacles
from kvxfer.plan.loops import Axis, LoopPart, Steps, kv_strands, make_rows, merge, strand
from kvxfer.plan.program import (
    COARSE,
    FINE,
    MAX_FOUND_NBYTES,
    MAX_HEADS,
    MAX_LOOPS,
    MAX_PAIR_NBYTES,
    MAX_RUNS,
    MAX_SCALES,
    MAX_UNITS,
    CopyProgram,
)
from kvxfer.plan.units import oversized, unit_tokens

_RANK = "the layout of one rank of several takes first_head=, total_heads=, first_layer=, total_layers="


def compile_program(
    src: KVLayout, dst: KVLayout, *, heads: range | None = None, fine: bool = False
) -> CopyProgram:
    """Compiles the program that copies units of `src` to units of `dst`.

    Layers are the outermost loop, pairs of units the next, then at most two strided axes around a contiguous
    run. Axes without gaps on both sides are merged. Axes beyond two are unrolled, the shortest first. Takes
    less than a millisecond as a rule: compile once for each pair of regions.

    Parameters
    ----------
    heads
        KV heads to move, numbered model-wide; None for all that both ends hold.
    fine
        Whether transfers may move token ranges that begin or end within a unit. This adds loops over single
        tokens.

    Raises
    ------
    UsageError
        ``layout-mismatch``: fields differ (`differences`; the message names all of them), no layer or no head
        is common, single tokens would move into pages with scales of their own, or the program would exceed a
        bound of agents, such as 8192 loops or 1 GiB of a block in one layer. ``out-of-range``: one end does
        not hold `heads`. ``invalid-argument``: `heads` have gaps.
    """
    layers, common_heads = _common_layers(src, dst), _common_heads(src, dst)
    wanted = common_heads if heads is None else _wanted_heads(src, dst, heads)
    found = _differences(src, dst, layers, wanted)
    if not layers:
        found.append(
            f"the two ends have no layer in common: {_span(src.layers)} at the source, {_span(dst.layers)} "
            "at the destination"
        )
    if not wanted:
        found.append(
            f"the two ends have no head in common: {_head_words(src)} at the source, {_head_words(dst)} at "
            "the destination"
        )
    if found:
        raise _mismatch("no copy program can convert one layout to the other: " + "; ".join(found))
    how = crossing(src, dst, layers, wanted)
    if fine:
        _require_static_scales(dst, how)
    unit = unit_tokens(src, dst)
    parts = _parts(src, dst, layers, wanted, how, unit, fine)
    _require_few(parts)
    loops, conversions = make_rows(parts, how, layers.start - dst.first_layer)
    for array in (loops, conversions, how.table):
        array.flags.writeable = False
    program = CopyProgram(
        loops=loops,
        conversions=conversions,
        scales=how.table,
        src_units=src.block_tokens // unit,
        dst_units=dst.block_tokens // unit,
        src_tokens=src.block_tokens if fine else 0,
        dst_tokens=dst.block_tokens if fine else 0,
        dst_heads=(wanted.start - dst.first_head, len(wanted), dst.num_heads),
        num_program_layers=dst.num_layers,
        origin=dst.first_layer,
        layers=layers,
        heads=wanted,
        unit_tokens=unit,
        rows_per_pair=unit * len(wanted) * src.num_kv,
        conversion_words=describe(src, dst, how),
    )
    _require_bounds(program)
    return program


def footprint(layout: KVLayout) -> NDArray[np.void]:
    """Returns loops over the bytes that block 0 of each layer owns; source and destination halves are equal.

    Page scales that lie in the region count as bytes of their blocks.
    """
    if layout.cp_size > 1:  # blocks are whole, regardless of which tokens they hold
        layout = replace(layout, cp_rank=0, cp_size=1, cp_interleave=1)
    return compile_program(layout, layout).loops


def differences(src: KVLayout, dst: KVLayout) -> list[str]:
    """Returns sentences, one a field, on why no program can copy `src` to `dst`; [] if one can.

    A pair of ranks without a common layer or head is not a difference: other ranks of the same caches have
    them.
    """
    return _differences(src, dst, _common_layers(src, dst), _common_heads(src, dst))


# ---- what two layouts have in common --------------------------------------------------------------


def _differences(src: KVLayout, dst: KVLayout, layers: range, heads: range) -> list[str]:
    found = [
        f"{words}: {ours} at the source, {theirs} at the destination"
        for words, ours, theirs in (
            # Names are compared only if both ends declare one.
            ("model", src.model or dst.model, dst.model or src.model),
            ("cache group", src.group or dst.group, dst.group or src.group),
            ("keys and values", _kv_words(src), _kv_words(dst)),
            ("head_dim", src.head_dim, dst.head_dim),
            ("heads of the model", src.total_heads, dst.total_heads),
            ("layers of the model", src.total_layers, dst.total_layers),
        )
        if ours != theirs
    ]
    if (src.total_heads, src.total_layers) != (dst.total_heads, dst.total_layers):
        found[-1] += f" ({_RANK})"
    unit = unit_tokens(src, dst)
    too_many = (oversized(src, unit, "source"), oversized(dst, unit, "destination"))
    return [*found, *obstacles(src, dst, layers, heads), *(words for words in too_many if words)]


def _common_layers(src: KVLayout, dst: KVLayout) -> range:
    return range(max(src.layers.start, dst.layers.start), min(src.layers.stop, dst.layers.stop))


def _common_heads(src: KVLayout, dst: KVLayout) -> range:
    ours, theirs = _heads(src), _heads(dst)
    return range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))


def _wanted_heads(src: KVLayout, dst: KVLayout, heads: range) -> range:
    heads = consecutive(heads, "heads")
    for end, layout in (("source", src), ("destination", dst)):
        held = _heads(layout)
        if heads.start < held.start or heads.stop > held.stop:
            raise UsageError(
                f"heads {_span(heads)} were named, but the {end} holds {_head_words(layout)} (numbered "
                "model-wide)",
                code="out-of-range",
            )
    return heads


def _require_static_scales(dst: KVLayout, how: Crossing) -> None:
    """Refuses to move single tokens if the scale of their page would have to change with them."""
    if how.dst.place == IN_REGION or how.moved is not None:
        raise _mismatch(
            f"tokens cannot move one by one into pages of {dst.block_tokens} tokens that have their own "
            "scales, because a scale applies to its whole page: move whole pages, or declare static scales"
        )


def _heads(layout: KVLayout) -> range:
    return range(layout.first_head, layout.first_head + layout.num_heads)


def _span(numbers: range) -> str:
    return f"{numbers[0]} to {numbers[-1]}"


def _head_words(layout: KVLayout) -> str:
    return f"{_span(_heads(layout))} of {layout.total_heads}"


def _kv_words(layout: KVLayout) -> str:
    return "told apart" if layout.num_kv == 2 else 'one (latent; write axis "c" for keys then values)'


def _mismatch(message: str) -> UsageError:
    return UsageError(message, code="layout-mismatch")


# ---- loops ----------------------------------------------------------------------------------------


def _parts(
    src: KVLayout, dst: KVLayout, layers: range, heads: range, how: Crossing, unit: int, fine: bool
) -> list[LoopPart]:
    """Returns the loops over units, over tokens if `fine`, and over scales that move as bytes."""
    strands, kv_axes = kv_strands(_offsets(src, layers, heads), _offsets(dst, layers, heads), how)
    axes = [
        Axis(len(heads), src.head_stride, dst.head_stride, how.src.head, how.dst.head),
        Axis(src.head_dim, src.dim_stride, dst.dim_stride),
        *kv_axes,
    ]
    whole_granules = how.dst.place == IN_REGION
    parts = []
    for grain, tokens in ((COARSE, unit), (FINE, 1))[: 2 if fine else 1]:
        token_axis = Axis(tokens, src.token_stride, dst.token_stride)
        elements, merged = merge([token_axis, *axes], src.itemsize, dst.itemsize)
        src_steps = Steps(src.block_stride, tokens * src.token_stride)
        dst_steps = Steps(dst.block_stride, tokens * dst.token_stride)
        parts.append(
            LoopPart(grain, strands, elements, merged, src.itemsize, src_steps, dst_steps, whole_granules)
        )
    if how.moved is not None:
        parts.append(_scale_part(src.num_kv, len(layers), len(heads), *how.moved))
    return parts


def _scale_part(num_kv: int, num_layers: int, num_heads: int, src: Scales, dst: Scales) -> LoopPart:
    """Returns the loops over page scales; all units of a source page share that page's scales."""
    axes = [Axis(num_kv, src.kv, dst.kv)]
    if dst.head:  # one scale for each head, else one for all heads
        axes.append(Axis(num_heads, src.head, dst.head))
    elements, merged = merge(axes, SCALE_NBYTES, SCALE_NBYTES)
    layers = np.arange(num_layers, dtype=np.int64)
    strands = [strand(src.offset + layers * src.layer, dst.offset + layers * dst.layer)]
    return LoopPart(COARSE, strands, elements, merged, SCALE_NBYTES, Steps(src.block, 0), Steps(dst.block, 0))


def _offsets(layout: KVLayout, layers: range, heads: range) -> NDArray[np.int64]:
    """Returns the offset of the first of `heads` of block 0, [layers, kv]."""
    first = layers.start - layout.first_layer
    table = layout.layer_offsets()[first : first + len(layers)]
    return table + (heads.start - layout.first_head) * layout.head_stride


def _require_few(parts: list[LoopPart]) -> None:
    """Refuses programs with too many loops, before any loop is made."""
    if any(part.num_unrolled == 0 for part in parts):
        raise _mismatch(
            "elements that share a page scale must be copied in one loop, but tokens, heads and dims lie so "
            "differently at the two ends that they need more: keep head_dim contiguous at both ends, or use "
            "a scale for each head"
        )
    num_loops = sum(part.num_stretches * part.num_unrolled for part in parts)
    if num_loops > MAX_LOOPS:
        first = parts[0]
        raise _mismatch(
            f"the copy program would need {num_loops} loops ({first.num_stretches} irregular stretches of "
            f"layers × {first.num_unrolled}), but the limit is {MAX_LOOPS}: allocate the layers in one "
            "tensor at one end or both"
        )


def _require_bounds(program: CopyProgram) -> None:
    """Refuses a program that an agent would refuse for its size."""
    loops = program.loops
    runs = loops["counts"].astype(np.int64).prod(axis=1)
    longest = np.maximum(program.run_nbytes("src"), program.run_nbytes("dst"))
    found = program.found_scales() > 0
    smaller = "use smaller blocks"
    for value, bound, what, cure in (
        (
            (runs * program.run_nbytes("src")).max(),
            MAX_PAIR_NBYTES,
            "bytes of a block in one layer would move in one loop",
            smaller,
        ),
        (
            (runs * np.maximum(longest, 64) * found).max(),
            MAX_FOUND_NBYTES,
            "bytes of a block would have their scales computed at once",
            smaller,
        ),
        (
            (runs * loops["num_layers"]).sum(),
            MAX_RUNS,
            "runs of a pair of blocks would move, over all layers",
            "let heads, tokens and dims lie in one order at both ends, or use smaller blocks",
        ),
        (max(program.units), MAX_UNITS, "units or tokens would make a block", smaller),
        (
            program.dst_heads[2],
            MAX_HEADS,
            "heads are held by the destination",
            "hold fewer of them in a rank",
        ),
        (len(program.scales), MAX_SCALES, "static scales would go along", "use one for each layer"),
    ):
        if value > bound:
            raise _mismatch(f"{value} {what}, but the limit is {bound}: {cure}")
