"""How (layer, kv, block, token, head, dim) maps to bytes of a region."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import UsageError
from kvxfer.schema import decode_object, require_fields
from kvxfer.tensor import TensorView, view

LAYOUT_VERSION: Final = 1
# native/core/wire.h: kMaxLayout. 4096 layers of one offset each fit.
MAX_ENCODED_NBYTES: Final = 64 * 1024

# Bounds of what a peer may claim. Nothing is allocated by them, but products of them must stay
# far from 64 bits: an offset is at most _MAX_NBYTES.
_MAX_LAYERS = 4096  # native/core/wire.h: kMaxLayers
_MAX_COUNT = 1 << 32
_MAX_NBYTES = 1 << 56
_MAX_ITEMSIZE = 16
_MAX_DTYPE_NAME = 32

_AXES: Final = "l2bthdc"


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Where each element of a rank's cache lies: strides and offsets in bytes, from the region's base.

    The element (layer l, kv k, block b, token t, head h, dim d) is at
    ``layer_offsets()[l, k] + b * block_stride + t * token_stride + h * head_stride + d * dim_stride``
    from the lowest byte that was registered. Make one with `from_tensor` or `from_tensors`.

    Attributes
    ----------
    dtype
        Name of the element type. Equal names are the only thing that two ends compare.
    itemsize
        Bytes of an element.
    num_blocks
        Blocks (pages) of the cache; ids are 0 to ``num_blocks - 1``.
    block_tokens
        Tokens of one block.
    num_kv
        2 where keys and values are told apart, 1 for a latent (MLA) or opaque page.
    head_dim
        Elements of one head of one of K or V.
    first_layer, num_layers, total_layers
        The slice of the model's layers that this rank holds. Layers are numbered model-wide.
    first_head, num_heads, total_heads
        The slice of the model's KV heads that this rank holds.
    block_stride, token_stride, head_stride, dim_stride
        Bytes from one index to the next; 0 for an axis of one element.
    offset, layer_stride, kv_stride
        Where layer and K or V begin, when that is regular.
    offsets
        Where it is not: one offset for each (layer, kv), layer-major; ``offset``,
        ``layer_stride`` and ``kv_stride`` are 0 then. Empty otherwise.
    """

    dtype: str
    itemsize: int
    num_blocks: int
    block_tokens: int
    num_kv: int
    head_dim: int
    first_layer: int
    num_layers: int
    total_layers: int
    first_head: int
    num_heads: int
    total_heads: int
    block_stride: int
    token_stride: int
    head_stride: int
    dim_stride: int
    offset: int = 0
    layer_stride: int = 0
    kv_stride: int = 0
    offsets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _validate(self)

    # ---- making one -------------------------------------------------------------------------

    @classmethod
    def from_tensor(
        cls,
        tensor: Any,
        axes: str,
        *,
        dtype: str | None = None,
        first_layer: int = 0,
        total_layers: int | None = None,
        first_head: int = 0,
        total_heads: int | None = None,
    ) -> KVLayout:
        """Reads the layout off one tensor that holds the whole cache of this rank.

        Parameters
        ----------
        tensor
            A torch tensor, a numpy array, or anything with DLPack or the buffer protocol, in any
            order of axes and with any positive strides. Only its shape and strides are read.
        axes
            One letter for each axis of `tensor`, in its order: ``l`` layer, ``2`` keys and values,
            ``b`` block, ``t`` token, ``h`` head, ``d`` dim. ``c`` in the place of ``d`` means that
            the axis is keys then values, 2 × head_dim, as vLLM lays them out. Without ``2`` and
            ``c`` the cache has no values of its own (MLA: ``"lbtd"``). Missing ``l``, ``t`` and
            ``h`` count one.
        dtype
            What the elements mean, where the tensor's own type is a stand-in (bfloat16 in uint16).
            Both ends must use the same name.
        first_layer, total_layers
            Which of the model's layers these are; all by default.
        first_head, total_heads
            Which of the model's KV heads these are; all by default.

        Raises
        ------
        UsageError
            ``invalid-argument`` when letters and axes do not fit, or the tensor overlaps itself.
        """
        seen = view(tensor)
        part = _read_axes(seen, axes)
        kv_stride = part.strides["2"]
        return cls(
            dtype=dtype or seen.dtype,
            itemsize=seen.itemsize,
            num_kv=part.counts["2"],
            first_layer=first_layer,
            num_layers=part.counts["l"],
            total_layers=first_layer + part.counts["l"] if total_layers is None else total_layers,
            first_head=first_head,
            total_heads=first_head + part.counts["h"] if total_heads is None else total_heads,
            layer_stride=part.strides["l"],
            kv_stride=kv_stride,
            **part.block_fields(),
        )

    @classmethod
    def from_tensors(
        cls,
        tensors: Any,
        axes: str,
        *,
        dtype: str | None = None,
        first_layer: int = 0,
        total_layers: int | None = None,
        first_head: int = 0,
        total_heads: int | None = None,
    ) -> KVLayout:
        """Reads the layout off several tensors: one for each layer, or keys and values apart.

        Parameters
        ----------
        tensors
            A list, tuple or dict (in its order). Without ``l`` in `axes`: an item for each layer,
            either a tensor or a pair (keys, values). With ``l``: the two tensors (keys, values)
            of all layers. Register the same object, so that offsets count from the same byte.
        axes
            Letters of every one of the tensors, as in `from_tensor`. All must have the same
            shape, strides and dtype; only where they lie may differ.
        dtype, first_layer, total_layers, first_head, total_heads
            As in `from_tensor`.
        """
        items = list(tensors.values()) if isinstance(tensors, Mapping) else list(tensors)
        if not items:
            raise UsageError("no tensors were given: pass one for each layer", code="invalid-argument")
        if "l" in axes:
            rows = [_pair(items, "the tensors of all layers")]
        elif isinstance(items[0], (list, tuple, Mapping)):
            rows = [
                _pair(list(item.values()) if isinstance(item, Mapping) else item, f"layer {i}")
                for i, item in enumerate(items)
            ]
        else:
            rows = [[view(item)] for item in items]
        apart = len(rows[0]) == 2
        if apart and ("2" in axes or "c" in axes):
            raise UsageError(
                f'axes "{axes}" put keys and values in one tensor, but pairs of tensors were given',
                code="invalid-argument",
            )
        first = rows[0][0]
        for i, row in enumerate(rows):
            if len(row) != len(rows[0]):
                raise UsageError(f"layer {i} is not a pair as layer 0 is", code="invalid-argument")
            for seen in row:
                _require_alike(first, seen, i)
        part = _read_axes(first, axes)
        # [rows, tensors of a row] -> [layers, kv], from the lowest byte.
        base = min(seen.address for row in rows for seen in row)
        starts = np.array([[seen.address - base for seen in row] for row in rows], np.int64)
        if "l" in axes:
            inner = np.arange(part.counts["l"], dtype=np.int64) * part.strides["l"]
            table = starts + inner[:, None]
        elif apart:
            table = starts
        else:
            table = starts + np.arange(part.counts["2"], dtype=np.int64) * part.strides["2"]
        num_layers, num_kv = table.shape
        return cls(
            dtype=dtype or first.dtype,
            itemsize=first.itemsize,
            num_kv=num_kv,
            first_layer=first_layer,
            num_layers=num_layers,
            total_layers=first_layer + num_layers if total_layers is None else total_layers,
            first_head=first_head,
            total_heads=first_head + part.counts["h"] if total_heads is None else total_heads,
            **_regular_or_listed(table),
            **part.block_fields(),
        )

    # ---- reading it --------------------------------------------------------------------------

    def layer_offsets(self) -> NDArray[np.int64]:
        """Returns where block 0 of each (layer of this rank, kv) begins, [num_layers, num_kv]."""
        if self.offsets:
            return np.array(self.offsets, np.int64).reshape(self.num_layers, self.num_kv)
        layers = np.arange(self.num_layers, dtype=np.int64) * self.layer_stride
        kvs = np.arange(self.num_kv, dtype=np.int64) * self.kv_stride
        return self.offset + layers[:, None] + kvs[None, :]

    @property
    def layers(self) -> range:
        """The layers that this rank holds, numbered model-wide."""
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def page_nbytes(self) -> int:
        """Bytes of one block in one layer, K and V together."""
        return self.num_kv * self.block_tokens * self.num_heads * self.head_dim * self.itemsize

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block in all layers of this rank."""
        return self.page_nbytes * self.num_layers

    @property
    def nbytes(self) -> int:
        """Bytes from the region's base to the end of the last element."""
        return int(self.layer_offsets().max()) + _extent(self, _block_axes(self))

    # ---- sending it --------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Returns the layout as JSON with a version, at most 64 KiB.

        Raises
        ------
        UsageError
            ``invalid-argument`` when listed offsets make it longer than that.
        """
        values: dict[str, object] = {"kvxfer_layout": LAYOUT_VERSION}
        for name in _FIELD_NAMES:
            values[name] = getattr(self, name)
        encoded = json.dumps(values, separators=(",", ":")).encode()
        if len(encoded) > MAX_ENCODED_NBYTES:
            raise UsageError(
                f"this layout takes {len(encoded)} bytes to send, the bound is {MAX_ENCODED_NBYTES}: "
                "allocate the layers in one tensor, so that their offsets are regular",
                code="invalid-argument",
            )
        return encoded

    @classmethod
    def from_bytes(cls, encoded: bytes) -> KVLayout:
        """Reads what `to_bytes` wrote; anything else is refused, so a peer's bytes are safe to pass.

        Raises
        ------
        UsageError
            ``invalid-argument``: too long, no JSON, another version, missing, unknown, repeated or
            absurd fields, or a layout that overlaps itself.
        """
        values = decode_object(encoded, MAX_ENCODED_NBYTES, "layout")
        version = values.pop("kvxfer_layout", None)
        if version != LAYOUT_VERSION or isinstance(version, bool):
            raise _bad(
                f"layout version {version!r} is not {LAYOUT_VERSION}: run the same kvxfer at both ends"
            )
        require_fields(values, _FIELD_NAMES, "layout")
        for name in _FIELD_NAMES:
            value = values[name]
            if name == "dtype":
                if not isinstance(value, str):
                    raise _bad(f"layout field dtype is a {type(value).__name__}, not a name")
            elif name == "offsets":
                if not isinstance(value, list) or not all(type(item) is int for item in value):
                    raise _bad("layout field offsets is no list of integers")
                values[name] = tuple(value)
            elif type(value) is not int:
                raise _bad(f"layout field {name} is a {type(value).__name__}, not an integer")
        return cls(**values)


_FIELD_NAMES: Final = tuple(field.name for field in fields(KVLayout))


# ---- tensors to numbers -------------------------------------------------------------------------


class _Axes:
    """Counts and byte strides by letter; ``2`` is K and V wherever they come from."""

    __slots__ = ("counts", "strides")

    def __init__(self) -> None:
        self.counts = dict.fromkeys("l2bthd", 1)
        self.strides = dict.fromkeys("l2bthd", 0)

    def put(self, letter: str, count: int, stride: int) -> None:
        self.counts[letter] = count
        self.strides[letter] = stride if count > 1 else 0

    def block_fields(self) -> dict[str, Any]:
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


def _read_axes(seen: TensorView, axes: str) -> _Axes:
    if len(axes) != len(seen.shape):
        raise _bad(
            f'axes "{axes}" name {len(axes)} axes, the tensor has {len(seen.shape)} (shape {seen.shape})'
        )
    if unknown := [letter for letter in axes if letter not in _AXES]:
        raise _bad(
            f'axes "{axes}" have unknown letters {", ".join(unknown)}: use l 2 b t h d, or c for K then V'
        )
    if len(set(axes)) != len(axes):
        raise _bad(f'axes "{axes}" name an axis twice')
    if "b" not in axes or ("d" in axes) == ("c" in axes):
        raise _bad(f'axes "{axes}" need b, and one of d and c')
    if "c" in axes and "2" in axes:
        raise _bad(f'axes "{axes}" tell keys from values twice: c holds both, and so does 2')
    part = _Axes()
    for letter, count, stride in zip(axes, seen.shape, seen.strides, strict=True):
        if count < 1:
            raise _bad(f"axis {letter} of the tensor is empty (shape {seen.shape})")
        if letter == "2" and count != 2:
            raise _bad(f"axis 2 is keys and values, but has {count} elements (shape {seen.shape})")
        if letter == "c":
            if count % 2:
                raise _bad(f"axis c is keys then values of equal size, but has {count} elements")
            part.put("d", count // 2, stride)
            part.put("2", 2, count // 2 * stride)
        else:
            part.put(letter, count, stride)
    return part


def _pair(items: Any, what: str) -> list[TensorView]:
    if len(items) != 2:
        raise _bad(f"{what}: expected keys and values, got {len(items)} tensors")
    return [view(item) for item in items]


def _require_alike(first: TensorView, seen: TensorView, layer: int) -> None:
    for name in ("shape", "strides", "dtype"):
        ours, theirs = getattr(first, name), getattr(seen, name)
        if ours != theirs:
            raise UsageError(
                f"{name} of layer {layer} is {theirs}, of layer 0 {ours}: layers of one region are alike; "
                "register a region for each group",
                code="layout-mismatch",
            )


def _regular_or_listed(table: NDArray[np.int64]) -> dict[str, Any]:
    offset = int(table[0, 0])
    layer_stride = int(table[1, 0] - table[0, 0]) if table.shape[0] > 1 else 0
    kv_stride = int(table[0, 1] - table[0, 0]) if table.shape[1] > 1 else 0
    if layer_stride >= 0 and kv_stride >= 0:
        layers, kvs = np.indices(table.shape)
        if np.array_equal(table, offset + layers * layer_stride + kvs * kv_stride):
            return {"offset": offset, "layer_stride": layer_stride, "kv_stride": kv_stride}
    return {"offsets": tuple(int(value) for value in table.ravel())}


# ---- checks -------------------------------------------------------------------------------------


def _block_axes(layout: KVLayout) -> list[tuple[str, int, int]]:
    """(name, count, stride) of the axes that repeat within one (layer, kv)."""
    return [
        ("block", layout.num_blocks, layout.block_stride),
        ("token", layout.block_tokens, layout.token_stride),
        ("head", layout.num_heads, layout.head_stride),
        ("dim", layout.head_dim, layout.dim_stride),
    ]


def _extent(layout: KVLayout, axes: list[tuple[str, int, int]]) -> int:
    return layout.itemsize + sum((count - 1) * stride for _, count, stride in axes)


def _validate(layout: KVLayout) -> None:
    """Refuses numbers that no cache has, and layouts in which two elements share a byte."""
    if not 0 < len(layout.dtype) <= _MAX_DTYPE_NAME or not layout.dtype.isascii():
        raise _bad(f"dtype {layout.dtype[:64]!r} is no name of at most {_MAX_DTYPE_NAME} ASCII letters")
    for name, low, high in (
        ("itemsize", 1, _MAX_ITEMSIZE),
        ("num_blocks", 1, _MAX_COUNT - 1),
        ("block_tokens", 1, _MAX_COUNT - 1),
        ("num_kv", 1, 2),
        ("head_dim", 1, _MAX_COUNT - 1),
        ("num_layers", 1, _MAX_LAYERS),
        ("total_layers", 1, _MAX_LAYERS),
        ("first_layer", 0, _MAX_LAYERS),
        ("num_heads", 1, _MAX_COUNT - 1),
        ("total_heads", 1, _MAX_COUNT - 1),
        ("first_head", 0, _MAX_COUNT - 1),
        ("block_stride", 0, _MAX_NBYTES),
        ("token_stride", 0, _MAX_NBYTES),
        ("head_stride", 0, _MAX_NBYTES),
        ("dim_stride", 0, _MAX_NBYTES),
        ("offset", 0, _MAX_NBYTES),
        ("layer_stride", 0, _MAX_NBYTES),
        ("kv_stride", 0, _MAX_NBYTES),
    ):
        value = getattr(layout, name)
        if not low <= value <= high:
            raise _bad(f"layout field {name} is {value}, not in {low} to {high}")
    for what in ("layer", "head"):
        plural = what + "s"
        first, num = getattr(layout, f"first_{what}"), getattr(layout, f"num_{plural}")
        if first + num > (total := getattr(layout, f"total_{plural}")):
            raise _bad(f"{plural} {first} to {first + num - 1} are not within a model of {total} {plural}")
    if layout.offsets:
        if len(layout.offsets) != layout.num_layers * layout.num_kv:
            wanted = f"{layout.num_layers} layers × {layout.num_kv} kv"
            raise _bad(f"{len(layout.offsets)} offsets are listed for {wanted}")
        if layout.offset or layout.layer_stride or layout.kv_stride:
            raise _bad("offsets are listed, so offset, layer_stride and kv_stride must be 0")
        if min(layout.offsets) < 0 or max(layout.offsets) > _MAX_NBYTES:
            raise _bad(f"an offset is not in 0 to {_MAX_NBYTES}")
    _refuse_overlap(layout)
    if layout.nbytes > _MAX_NBYTES:
        raise _bad(f"the layout spans {layout.nbytes} bytes, the bound is {_MAX_NBYTES}")


def _refuse_overlap(layout: KVLayout) -> None:
    axes = _block_axes(layout)
    if not layout.offsets:
        axes += [("layer", layout.num_layers, layout.layer_stride), ("kv", layout.num_kv, layout.kv_stride)]
    axes = sorted((axis for axis in axes if axis[1] > 1), key=lambda axis: axis[2])
    # Nested strides: each step is at least as long as everything inside it.
    inside = layout.itemsize
    for name, count, stride in axes:
        if stride < inside:
            raise _bad(f"{name}s overlap: {stride} bytes from one to the next, {inside} bytes each")
        inside += (count - 1) * stride
    if len(layout.offsets) > 1:
        # Listed offsets may interleave with an axis (K and V of one page): what is finer than the
        # smallest gap between two offsets must fit in it.
        gap = int(np.diff(np.sort(np.array(layout.offsets, np.int64))).min())
        inside = _extent(layout, [axis for axis in axes if axis[2] <= gap])
        if inside > gap:
            raise _bad(f"layers overlap: two begin {gap} bytes apart, {inside} bytes each")


def _bad(message: str) -> UsageError:
    return UsageError(message, code="invalid-argument")
