"""Axes strings: reads counts, strides and offsets of the lettered axes off tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import UsageError, invalid
from kvxfer.layout.quantization import Quantization
from kvxfer.layout.tensor import TensorView, dtype_name, flatten, view

_LETTERS: Final = "l2bthdc"


class Axes:
    """Counts and byte strides by letter; ``2`` is K and V, whether one tensor or two hold them."""

    __slots__ = ("counts", "strides")

    def __init__(self) -> None:
        self.counts = dict.fromkeys("l2bthd", 1)
        self.strides = dict.fromkeys("l2bthd", 0)

    @classmethod
    def of_view(cls, seen: TensorView, axes: str) -> Axes:
        """Reads one tensor.

        Raises
        ------
        UsageError
            ``invalid-argument`` when the letters do not fit its shape.
        """
        if not isinstance(cast(object, axes), str):
            raise invalid(
                f'axes must be a text with a letter for each axis, e.g. "l2bthd", not {axes!r:.200}'
            )
        if len(axes) != len(seen.shape):
            raise invalid(
                f'axes "{axes}" name {len(axes)} axes, but the tensor has {len(seen.shape)} (shape '
                f"{seen.shape})"
            )
        if unknown := [letter for letter in axes if letter not in _LETTERS]:
            raise invalid(
                f'axes "{axes}" have unknown letters {", ".join(unknown)}: use l 2 b t h d, or c for K then V'
            )
        if len(set(axes)) != len(axes):
            raise invalid(f'axes "{axes}" name an axis twice')
        if "b" not in axes or ("d" in axes) == ("c" in axes):
            raise invalid(f'axes "{axes}" need b, and either d or c')
        if "c" in axes and "2" in axes:
            raise invalid(
                f'axes "{axes}" have both c and 2: each of them holds keys and values, so use only one'
            )
        part = cls()
        for letter, count, stride in zip(axes, seen.shape, seen.strides, strict=True):
            if count < 1:
                raise invalid(f"axis {letter} of the tensor is empty (shape {seen.shape})")
            if letter == "2" and count != 2:
                raise invalid(
                    f"axis 2 must be keys and values, but has {count} elements (shape {seen.shape})"
                )
            if letter == "c":
                if count % 2:
                    raise invalid(f"axis c must be keys then values of equal size, but has {count} elements")
                part.put("d", count // 2, stride)
                part.put("2", 2, count // 2 * stride)
            else:
                part.put(letter, count, stride)
        return part

    def put(self, letter: str, count: int, stride: int) -> None:
        """Sets an axis; an axis of one element has no stride."""
        self.counts[letter] = count
        self.strides[letter] = stride if count > 1 else 0

    def block_fields(self) -> dict[str, Any]:
        """Returns the layout fields that describe the inside of one (layer, kv)."""
        counts, strides = self.counts, self.strides
        return {
            "num_blocks": counts["b"],
            "block_tokens": counts["t"],
            "num_heads": counts["h"],
            "head_dim": counts["d"],
            "block_stride": strides["b"],
            "token_stride": strides["t"],
            "head_stride": strides["h"],
            "dim_stride": strides["d"],
        }


def read_one(
    tensor: Any, axes: str, dtype: Any, scales: Any, scale_axes: str, saturate: bool
) -> dict[str, Any]:
    """Returns the layout fields that follow from one tensor of the whole cache."""
    seen = view(tensor)
    part = Axes.of_view(seen, axes)
    table = np.arange(part.counts["l"], dtype=np.int64)[:, None] * part.strides["l"]
    table = table + np.arange(part.counts["2"], dtype=np.int64) * part.strides["2"]
    return _fields(seen, part, table, seen.address, dtype, scales, scale_axes, saturate)


def read_many(
    tensors: Any, axes: str, dtype: Any, scales: Any, scale_axes: str, saturate: bool
) -> dict[str, Any]:
    """Returns the layout fields that follow from several tensors: one a layer, or keys and values apart."""
    rows = _rows(tensors, axes)
    apart = len(rows[0]) == 2
    if apart and ("2" in axes or "c" in axes):
        raise invalid(f'axes "{axes}" put keys and values in one tensor, but pairs of tensors were given')
    first = rows[0][0]
    for i, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise invalid(f"layer {i} has another number of tensors than layer 0")
        for seen in row:
            _require_alike(first, seen, i)
    part = Axes.of_view(first, axes)
    # [rows, tensors of a row] -> [layers, kv], from the lowest byte.
    base = min(seen.address for row in rows for seen in row)
    table = np.array([[seen.address - base for seen in row] for row in rows], np.int64)
    if "l" in axes:
        table = table + (np.arange(part.counts["l"], dtype=np.int64) * part.strides["l"])[:, None]
    elif not apart:
        table = table + np.arange(part.counts["2"], dtype=np.int64) * part.strides["2"]
    return _fields(first, part, table, base, dtype, scales, scale_axes, saturate)


def regular_or_listed(table: NDArray[np.int64]) -> dict[str, Any]:
    """Returns the layout fields that say where each (layer, kv) of `table` [num_layers, num_kv] begins."""
    offset = int(table[0, 0])
    layer_stride = int(table[1, 0] - table[0, 0]) if table.shape[0] > 1 else 0
    kv_stride = int(table[0, 1] - table[0, 0]) if table.shape[1] > 1 else 0
    if layer_stride >= 0 and kv_stride >= 0:
        layers, kvs = np.indices(table.shape)
        if np.array_equal(table, offset + layers * layer_stride + kvs * kv_stride):
            return {"offset": offset, "layer_stride": layer_stride, "kv_stride": kv_stride}
    return {"offsets": tuple(int(value) for value in table.ravel())}


def _fields(
    seen: TensorView,
    part: Axes,
    table: NDArray[np.int64],
    base: int,
    dtype: Any,
    scales: Any,
    scale_axes: str,
    saturate: bool,
) -> dict[str, Any]:
    num_layers, num_kv = table.shape
    fields: dict[str, Any] = {}
    if scales is not None:
        views = [view(item) for item in flatten(scales)]
        if not views:
            raise invalid("scales are an empty list: leave them out if there are none")
        lowest = min(base, *(item.address for item in views))
        # The region begins at the lowest registered byte.
        table = table + (base - lowest)
        counts = {**part.counts, "l": num_layers, "2": num_kv}
        fields["quantization"] = Quantization.of_views(
            views, scale_axes, base=lowest, counts=counts, saturate=saturate
        )
    elif scale_axes or not saturate:
        raise invalid(
            "scale_axes and saturate describe scales, but no scales were given: for a cache without scales "
            "pass quantization=Quantization.per_tensor(1, saturate=False)"
        )
    return {
        "dtype": seen.dtype if dtype is None else dtype_name(dtype),
        "itemsize": seen.itemsize,
        "num_layers": num_layers,
        "num_kv": num_kv,
        **regular_or_listed(table),
        **part.block_fields(),
        **fields,
    }


def _rows(tensors: Any, axes: str) -> list[list[TensorView]]:
    items = list(tensors.values()) if isinstance(tensors, Mapping) else list(tensors)
    if not items:
        raise invalid("no tensors were given: pass one for each layer")
    if "l" in axes:
        return [_pair(items, "the tensors of all layers")]
    if isinstance(items[0], (list, tuple, Mapping)):
        return [
            _pair(list(item.values()) if isinstance(item, Mapping) else item, f"layer {i}")
            for i, item in enumerate(items)
        ]
    return [[view(item)] for item in items]


def _pair(items: Any, what: str) -> list[TensorView]:
    if len(items) != 2:
        raise invalid(f"{what}: expected keys and values, got {len(items)} tensors")
    return [view(item) for item in items]


def _require_alike(first: TensorView, seen: TensorView, layer: int) -> None:
    for name in ("shape", "strides", "dtype"):
        ours, theirs = getattr(first, name), getattr(seen, name)
        if ours != theirs:
            raise UsageError(
                f"{name} of layer {layer} is {theirs}, but of layer 0 {ours}: layers of one region must be "
                "alike; register a region for each group",
                code="layout-mismatch",
            )
