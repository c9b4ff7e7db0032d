"""Assigns ranks to each other: which source rank serves which layers and heads of each destination rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import UsageError, invalid
from kvxfer.layout.kv_layout import KVLayout


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one destination rank's cache that one source rank serves.

    Attributes
    ----------
    src, dst
        Indexes of the two ranks in the sequences that `route` was called with.
    layers, heads
        Numbered model-wide.
    nbytes
        Bytes at the source of one of its blocks of these layers and heads.
    """

    src: int
    dst: int
    layers: range
    heads: range
    nbytes: int


def route(
    srcs: Sequence[KVLayout], dsts: Sequence[KVLayout], load: Sequence[float] | None = None
) -> tuple[Share, ...]:
    """Divides the caches of all destination ranks among the source ranks that hold them.

    Every (layer, head) of every destination is served once. If several sources hold the same slice
    (replicated heads or layers, a replicated latent), the source with the least load serves it, and among
    equals the first. So both ends compute the same result from the same layouts. With context parallelism
    each source that holds tokens of a destination serves these tokens.

    Parameters
    ----------
    srcs
        The ranks that hold one request: all ranks of one engine, without its data-parallel replicas.
    dsts
        The ranks that need the request.
    load
        Existing load of each source, in bytes of a block as in `Share.nbytes`; None for no load.

    Returns
    -------
    tuple of Share
        Ordered by destination; within one, by the rank that holds the tokens, by layer and by head.

    Raises
    ------
    UsageError
        ``layout-mismatch``: no source holds some part of a destination (the message names axis and numbers),
        slices of two sources overlap without being equal, or two ranks that would be paired differ
        (`kvxfer.plan.differences`). ``invalid-argument``: there are no sources, or `load` does not fit.
    """
    busy = _loads(load, len(srcs))
    if not srcs:
        raise invalid("no source ranks were given: pass all that hold the request")
    _require_one_cache(srcs, dsts)
    holders = _holders(srcs)
    _require_equal_or_apart(holders)
    shares = []
    for index, dst in enumerate(dsts):
        wanted = _Slice.of(dst)
        for rank in _token_ranks(srcs[0], dst):
            pieces = [piece for piece in holders if piece.cp_rank == rank and piece.meets(wanted)]
            _require_cover(wanted, pieces, f"destination {index}", rank, srcs[0].cp_size)
            for piece in sorted(pieces, key=lambda piece: (piece.layers.start, piece.heads.start)):
                src = min(holders[piece], key=lambda holder: (busy[holder], holder))
                layers, heads = _common(piece.layers, wanted.layers), _common(piece.heads, wanted.heads)
                share = Share(src, index, layers, heads, _nbytes(srcs[src], layers, heads))
                busy[src] += share.nbytes
                shares.append(share)
    _require_bridges(shares, srcs, dsts)
    return tuple(shares)


class _Slice(NamedTuple):
    """What one rank holds: layers, heads, and the tokens of its context-parallel rank."""

    layers: range
    heads: range
    cp_rank: int

    @classmethod
    def of(cls, layout: KVLayout) -> _Slice:
        heads = range(layout.first_head, layout.first_head + layout.num_heads)
        return cls(layout.layers, heads, layout.cp_rank)

    def meets(self, other: _Slice) -> bool:
        """Whether both slices have a (layer, head) in common."""
        return bool(_common(self.layers, other.layers)) and bool(_common(self.heads, other.heads))


def _common(ours: range, theirs: range) -> range:
    return range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))


def _nbytes(layout: KVLayout, layers: range, heads: range) -> int:
    row = layout.num_kv * layout.block_tokens * layout.head_dim * layout.itemsize
    return row * len(layers) * len(heads)


def _loads(load: Sequence[float] | None, num_srcs: int) -> list[float]:
    if load is None:
        return [0.0] * num_srcs
    if len(load) != num_srcs or not all(math.isfinite(value) and value >= 0 for value in load):
        raise invalid(
            f"load {list(load)} does not fit {num_srcs} sources: pass a finite number of at least 0 for each"
        )
    return [float(value) for value in load]


def _holders(srcs: Sequence[KVLayout]) -> dict[_Slice, list[int]]:
    """Returns the sources that hold each distinct slice, in the order of the sources."""
    holders: dict[_Slice, list[int]] = {}
    for index, src in enumerate(srcs):
        holders.setdefault(_Slice.of(src), []).append(index)
    return holders


def _token_ranks(src: KVLayout, dst: KVLayout) -> list[int]:
    """Returns the context-parallel ranks of the sources that hold tokens of a destination.

    A rank's tokens are runs of ``interleave`` tokens that begin at ``rank * interleave`` and repeat every
    ``interleave * size``. Two ranks have tokens in common if their runs overlap after a shift by some
    multiple of the greatest common divisor of both periods.
    """
    teeth = src.cp_interleave if src.cp_size > 1 else 1, dst.cp_interleave if dst.cp_size > 1 else 1
    common = math.gcd(teeth[0] * src.cp_size, teeth[1] * dst.cp_size)
    found = []
    for rank in range(src.cp_size):
        ahead = (rank * teeth[0] - dst.cp_rank * teeth[1]) % common
        if ahead < teeth[1] or ahead - common > -teeth[0]:
            found.append(rank)
    return found


# ---- checks ---------------------------------------------------------------------------------------


def _require_one_cache(srcs: Sequence[KVLayout], dsts: Sequence[KVLayout]) -> None:
    """Refuses ranks that number layers, heads or tokens in different ways."""
    for end, layouts in (("source", srcs), ("destination", dsts)):
        for index, layout in enumerate(layouts):
            for what, number, first in (
                ("layers", layout.total_layers, srcs[0].total_layers),
                ("heads", layout.total_heads, srcs[0].total_heads),
            ):
                if number != first:
                    raise _mismatch(
                        f"{what} of the model: {first} at source 0, {number} at {end} {index}: all ranks "
                        "must belong to one model and cache group"
                    )
    parallel = [(src.cp_size, src.cp_interleave if src.cp_size > 1 else 1) for src in srcs]
    for index, pair in enumerate(parallel):
        if pair != parallel[0]:
            raise _mismatch(
                f"tokens: source 0 is one of {parallel[0][0]} context-parallel ranks that take "
                f"{parallel[0][1]} tokens in turn, but source {index} is one of {pair[0]} that take "
                f"{pair[1]}: the sources of a request must divide its tokens in one way"
            )


def _require_equal_or_apart(holders: dict[_Slice, list[int]]) -> None:
    """Refuses sources that share some layers and heads, but not all: a slice was declared wrongly."""
    slices = sorted(holders, key=lambda piece: (piece.cp_rank, piece.layers.start, piece.layers.stop))
    for at, one in enumerate(slices):
        for other in slices[at + 1 :]:
            if other.cp_rank != one.cp_rank or other.layers.start >= one.layers.stop:
                break
            if one.meets(other):
                axis = "layers" if one.layers != other.layers else "heads"
                ours, theirs = getattr(one, axis), getattr(other, axis)
                raise _mismatch(
                    f"{axis} overlap: source {holders[one][0]} holds {_span(ours)}, source "
                    f"{holders[other][0]} holds {_span(theirs)}; slices must be equal (replicated) or must "
                    "not overlap"
                )


def _require_cover(wanted: _Slice, pieces: list[_Slice], who: str, cp_rank: int, cp_size: int) -> None:
    """Refuses a destination if no source holds some of its layers or heads."""
    held = np.zeros((len(wanted.layers), len(wanted.heads)), np.bool_)
    for piece in pieces:
        layers, heads = _common(piece.layers, wanted.layers), _common(piece.heads, wanted.heads)
        rows = slice(layers.start - wanted.layers.start, layers.stop - wanted.layers.start)
        held[rows, heads.start - wanted.heads.start : heads.stop - wanted.heads.start] = True
    if held.all():
        return
    tokens = f" for the tokens of context-parallel rank {cp_rank} of {cp_size}" if cp_size > 1 else ""
    rows_held = np.asarray(held.any(axis=1))
    if not rows_held.all():
        gap = _first_gap(rows_held, wanted.layers.start)
        raise _mismatch(
            f"layers: no source holds {_span(gap)} of {who}, which has {_span(wanted.layers)}{tokens}"
        )
    row = int(held.all(axis=1).argmin())
    gap = _first_gap(held[row], wanted.heads.start)
    raise _mismatch(
        f"heads: no source holds {_span(gap)} of {who} in layer {wanted.layers.start + row}, which has "
        f"{_span(wanted.heads)}{tokens}"
    )


def _require_bridges(shares: list[Share], srcs: Sequence[KVLayout], dsts: Sequence[KVLayout]) -> None:
    from kvxfer.plan.compile import differences  # loads the planner only when it is needed

    for share in shares:
        if found := differences(srcs[share.src], dsts[share.dst]):
            raise _mismatch(f"source {share.src} cannot serve destination {share.dst}: {'; '.join(found)}")


def _first_gap(held: NDArray[np.bool_], start: int) -> range:
    """Returns the first numbers, from `start` on, that are not held."""
    first = int(held.argmin())
    length = int(held[first:].argmax()) or len(held) - first
    return range(start + first, start + first + length)


def _span(numbers: range) -> str:
    return f"{numbers[0]} to {numbers[-1]}"


def _mismatch(message: str) -> UsageError:
    return UsageError(message, code="layout-mismatch")
