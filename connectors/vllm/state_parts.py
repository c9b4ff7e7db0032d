"""What a row of states is made of: parts, each of which tensor parallelism divides by heads of its own.

A row of Mamba2 or GDN is a convolution's last inputs (of three projections) and a state for each head.
Ranks of one engine hold some heads of every part, so a row of one engine is no slice of another's, but
its parts are. They are found from the row's shapes alone, as the engine's shape calculators make them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

#: Projections that the convolution sees, in their order, and the state behind them.
_PARTS: Final = {
    MambaAttentionBackendEnum.MAMBA2: ("x", "b", "c", "state"),
    MambaAttentionBackendEnum.GDN_ATTN: ("q", "k", "v", "state"),
}


@dataclass(frozen=True, slots=True)
class StatePart:
    """One part of a row.

    Attributes
    ----------
    views
        For each layer its tensor, with one axis for each letter of `axes`.
    axes
        As `kvxfer.KVLayout.from_tensors` reads them: the inputs of a convolution are its tokens.
    num_heads
        That this rank holds.
    declared
        In words what two engines' parts must have alike, beside their sizes.
    """

    views: list[Any]
    axes: str
    num_heads: int
    declared: str


def part_names(spec: MambaSpec) -> tuple[str, ...]:
    """Returns the names of a row's parts; one, "", where it is moved whole and to the same shard alone."""
    return _PARTS[spec.mamba_type] if _sizes(spec) is not None else ("",)


def part_of(name: str, spec: MambaSpec, caches: list[Any]) -> StatePart:
    """Returns one part of the rows of some layers.

    Parameters
    ----------
    name
        One of `part_names`.
    spec
        Of all of these layers.
    caches
        As the engine registers them: for each layer a tensor of bytes [block, 1, 1, row].
    """
    rows = [cache.view(cache.shape[0], -1) for cache in caches]
    kind = spec.mamba_type.name
    sizes = _sizes(spec)
    if not name or sizes is None:
        shapes = (f"{list(shape)} {dtype}" for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
        return StatePart([row[:, None] for row in rows], "bhd", 1, f"{kind} {' '.join(shapes)}")
    at = _PARTS[spec.mamba_type].index(name)
    num_heads, head_dim = sizes[at]
    conv, conv_dtype = spec.shapes[0], spec.dtypes[0]
    conv_nbytes = math.prod(conv) * conv_dtype.itemsize
    if name == "state":
        stop = conv_nbytes + num_heads * head_dim * spec.dtypes[1].itemsize
        views = [row[:, conv_nbytes:stop].view(spec.dtypes[1]) for row in rows]
        views = [view.unflatten(1, (num_heads, head_dim)) for view in views]
        return StatePart(views, "bhd", num_heads, f"{kind} state {spec.dtypes[1]}")
    first = sum(heads * dim for heads, dim in sizes[:at])
    dim_axis = _dim_axis(conv)
    num_inputs = conv[1 - dim_axis]
    views = [row[:, :conv_nbytes].view(conv_dtype).unflatten(1, conv) for row in rows]
    views = [view.narrow(1 + dim_axis, first, num_heads * head_dim) for view in views]
    views = [view.unflatten(1 + dim_axis, (num_heads, head_dim)) for view in views]
    axes = "bthd" if dim_axis else "bhdt"
    return StatePart(views, axes, num_heads, f"{kind} {num_inputs} inputs {name} {conv_dtype}")


def _sizes(spec: MambaSpec) -> list[tuple[int, int]] | None:
    """Returns (heads of this rank, dim of a head) of each part, or None where they cannot be told apart."""
    if spec.mamba_type not in _PARTS or len(spec.shapes) != 2 or spec.tp_replicated:
        return None
    conv, state = spec.shapes
    if len(conv) != 2 or len(state) != 3:
        return None
    conv_dim = conv[_dim_axis(conv)]
    num_heads, rows, columns = state
    # What is left of the convolution's inputs is two projections alike: B and C, or queries and keys.
    wide = num_heads * rows
    num_groups, rest = divmod(conv_dim - wide, 2 * columns)
    if rest or num_groups < 1:
        return None
    group, head = (num_groups, columns), (num_heads, rows)
    conv_sizes = [head, group, group] if spec.mamba_type.name == "MAMBA2" else [group, group, head]
    return [*conv_sizes, (num_heads, rows * columns)]


def _dim_axis(conv: tuple[int, ...]) -> int:
    """Returns which axis of a convolution's inputs is not time; either may come first. Inputs are few."""
    return conv.index(max(conv))
