"""Splits a row of states into parts; tensor parallelism divides each part by its own heads.

A row of Mamba2 or GDN holds a convolution's last inputs (of three projections) and a state for each head.
Each rank holds some heads of every part. So a rank's row is not a slice of another engine's row, but each of
its parts is a slice of that engine's part. The parts are derived from the row's shapes alone, which the
engine's shape calculators make.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

#: The projections that enter the convolution, in their order, and then the state.
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
        As `kvxfer.KVLayout.from_tensors` reads them: a convolution's inputs take the token axis.
    num_heads
        Heads that this rank holds.
    declared
        A text that must be equal at two engines, beside the parts' sizes.
    """

    views: list[Any]
    axes: str
    num_heads: int
    declared: str


def part_names(spec: MambaSpec) -> tuple[str, ...]:
    """Returns the names of a row's parts; only "" if the row moves whole, and only to the same shard."""
    return _PARTS[spec.mamba_type] if _sizes(spec) is not None else ("",)


def part_of(name: str, spec: MambaSpec, caches: list[Any]) -> StatePart:
    """Returns one part of the rows of some layers.

    Parameters
    ----------
    name
        One of `part_names`.
    spec
        The specification of all these layers.
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
    """Returns (heads of this rank, dim of a head) of each part, or None if they cannot be determined."""
    if spec.mamba_type not in _PARTS or len(spec.shapes) != 2 or spec.tp_replicated:
        return None
    conv, state = spec.shapes
    if len(conv) != 2 or len(state) != 3:
        return None
    conv_dim = conv[_dim_axis(conv)]
    num_heads, rows, columns = state
    # The remaining inputs of the convolution are two projections of equal size: B and C, or queries and keys.
    wide = num_heads * rows
    num_groups, rest = divmod(conv_dim - wide, 2 * columns)
    if rest or num_groups < 1:
        return None
    group, head = (num_groups, columns), (num_heads, rows)
    conv_sizes = [head, group, group] if spec.mamba_type.name == "MAMBA2" else [group, group, head]
    return [*conv_sizes, (num_heads, rows * columns)]


def _dim_axis(conv: tuple[int, ...]) -> int:
    """Returns the axis of a convolution's inputs that is not time: the longer one, because inputs are few."""
    return conv.index(max(conv))
