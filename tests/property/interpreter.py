"""Executes a copy program as its format says, in numpy: the formula of copy_program.h, written again.

So that a plan can be judged without the native executor, and the executor without the plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvxfer.layout.kv_layout import KVLayout
from tests.property import rounding

Bytes = NDArray[np.uint8]
Offsets = NDArray[np.int64]


class Program(Protocol):
    """What of `kvxfer.plan.CopyProgram` is looked at."""

    @property
    def loops(self) -> NDArray[Any]: ...
    @property
    def conversions(self) -> NDArray[Any]: ...
    @property
    def scales(self) -> NDArray[np.float32]: ...
    @property
    def src_units(self) -> int: ...
    @property
    def dst_units(self) -> int: ...
    @property
    def src_tokens(self) -> int: ...
    @property
    def dst_tokens(self) -> int: ...


@dataclass(frozen=True)
class Pairs:
    """Unit ids of both ends: coarse pairs first, then `num_fine` fine ones."""

    src_ids: NDArray[np.uint32]
    dst_ids: NDArray[np.uint32]
    num_fine: int


@dataclass(frozen=True)
class Runs:
    """All runs of one loop in one layer, arrays [pairs, counts[0], counts[1]]."""

    src: Offsets
    dst: Offsets
    nbytes: int
    conversion: Any  # a record, None for bytes as they are
    src_scales: Offsets  # floats of the program's table, or bytes of the region
    dst_scales: Offsets


def unit_tokens(src: KVLayout, dst: KVLayout) -> int:
    """Tokens of a unit: all that both pages, and the turns of ends that take turns apart, divide into."""
    unit = math.gcd(src.block_tokens, dst.block_tokens)
    turns = [(end.cp_size, end.cp_rank, end.cp_interleave) for end in (src, dst) if end.cp_size > 1]
    if len(turns) == 2 and turns[0] == turns[1]:
        return unit
    return math.gcd(unit, *(interleave for _, _, interleave in turns))


def units(program: Program) -> tuple[int, int, int, int]:
    """Returns (src_units, dst_units, src_tokens, dst_tokens), as the native module takes them."""
    return program.src_units, program.dst_units, program.src_tokens, program.dst_tokens


def runs(program: Program, layer: int, pairs: Pairs) -> Iterator[Runs]:
    """Expands every loop that has `layer` (numbered as the program does) over the pairs of its grain."""
    num_coarse = len(pairs.src_ids) - pairs.num_fine
    for loop in program.loops:
        step = layer - int(loop["first_layer"])
        if not 0 <= step < int(loop["num_layers"]):
            continue
        if int(loop["grain"]) == 0:
            chosen, per_block = slice(0, num_coarse), (program.src_units, program.dst_units)
        else:
            chosen, per_block = slice(num_coarse, None), (program.src_tokens, program.dst_tokens)
            if not pairs.num_fine:
                continue
        kind = int(loop["conversion"])
        conversion = program.conversions[kind - 1] if kind else None
        places, scales = [], []
        for side, ids, num in (
            ("src", pairs.src_ids[chosen], per_block[0]),
            ("dst", pairs.dst_ids[chosen], per_block[1]),
        ):
            block, unit = np.divmod(ids.astype(np.int64)[:, None, None], num)
            first = _nest(loop, side, step, block, loop["counts"])
            places.append(first + unit * int(loop[f"{side}_unit_stride"]))
            scales.append(
                np.empty(0, np.int64)
                if conversion is None
                else _nest(conversion, side, step, block, loop["counts"])
            )
        yield Runs(places[0], places[1], int(loop["nbytes"]), conversion, scales[0], scales[1])


def _nest(record: Any, side: str, step: int, block: Offsets, counts: Any) -> Offsets:
    """Returns what loops and conversions have in common: offset, layer, block, i and j."""
    i = np.arange(int(counts[0]), dtype=np.int64)[None, :, None]
    j = np.arange(int(counts[1]), dtype=np.int64)[None, None, :]
    where: Offsets = (
        int(record[f"{side}_offset"])
        + step * int(record[f"{side}_layer_stride"])
        + block * int(record[f"{side}_block_stride"])
        + i * int(record[f"{side}_strides"][0])
        + j * int(record[f"{side}_strides"][1])
    )
    return where


def program_map(program: Program, layers: range, pairs: Pairs, dst_nbytes: int) -> tuple[Offsets, Offsets]:
    """Returns where each byte of the destination comes from, -1 for nowhere, and how often it is written.

    For programs without conversions. Bytes behind the memory raise.
    """
    origin = np.full(dst_nbytes, -1, np.int64)
    times = np.zeros(dst_nbytes, np.int64)
    for layer in layers:
        for found in runs(program, layer, pairs):
            assert found.conversion is None, "bytes of one dtype are converted"
            every = np.arange(found.nbytes, dtype=np.int64)
            src, dst = found.src[..., None] + every, found.dst[..., None] + every
            if not dst.size:
                continue
            assert dst.min() >= 0, "a run begins before the destination's memory"
            assert dst.max() < dst_nbytes, "a run ends behind the destination's memory"
            origin[dst] = src
            times += np.bincount(dst.ravel(), minlength=dst_nbytes)
    return origin, times


def execute(program: Program, layer: int, pairs: Pairs, src: Bytes, dst: Bytes) -> None:
    """Moves the bytes of one layer, converting where the program says so."""
    for found in runs(program, layer, pairs):
        if not found.src.size:
            continue
        if found.conversion is None:
            every = np.arange(found.nbytes, dtype=np.int64)
            dst[found.dst[..., None] + every] = src[found.src[..., None] + every]
        else:
            _convert(program, found, src, dst)


def _convert(program: Program, found: Runs, src: Bytes, dst: Bytes) -> None:
    record = found.conversion
    saturate = bool(record["saturate"])
    from_type = rounding.DTYPES[rounding.NUMBERS[int(record["src_dtype"])]]
    to_name = rounding.NUMBERS[int(record["dst_dtype"])]
    to_type = rounding.DTYPES[to_name]
    stored = src[found.src[..., None] + np.arange(found.nbytes, dtype=np.int64)].view(from_type)
    x = rounding.widen(stored)
    with np.errstate(all="ignore"):
        if int(record["src_scales"]):
            x = x * _scales(program, int(record["src_scales"]), found.src_scales, src)[..., None]
        if int(record["dst_scales"]) == 1:
            x = x / _scales(program, 1, found.dst_scales, dst)[..., None]
        elif int(record["dst_scales"]) == 2:
            # All runs that share a scale are a granule: of one pair, since units are whole pages then.
            for place in np.unique(found.dst_scales):
                mine = np.broadcast_to(found.dst_scales == place, found.dst.shape)
                scale = rounding.dynamic_scale(x[mine], to_name)
                dst[place + np.arange(4)] = np.frombuffer(scale.tobytes(), np.uint8)
                x[mine] = x[mine] / scale
    out = rounding.narrow(x, to_name, saturate).view(np.uint8)
    dst[found.dst[..., None] + np.arange(stored.shape[-1] * to_type.itemsize, dtype=np.int64)] = out


def _scales(program: Program, place: int, where: Offsets, memory: Bytes) -> NDArray[np.float32]:
    if place == 1:
        listed: NDArray[np.float32] = program.scales[where]
        return listed
    raw = np.ascontiguousarray(memory[where[..., None] + np.arange(4)])
    return raw.view("<f4")[..., 0]
