"""Scales that stored elements are multiplied by."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvxfer.errors import invalid
from kvxfer.layout.schema import MANDATORY, Field, Schema, flag, integer, text

if TYPE_CHECKING:
    from kvxfer.layout.tensor import TensorView

#: Types that can be converted and scaled, with the bytes of an element. Other types are copied as bytes.
SCALABLE_NBYTES: Final[Mapping[str, int]] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
#: Bytes of a scale, in a region and on the wire.
SCALE_NBYTES: Final = 4

Per = Literal["tensor", "layer", "head", "page", "page_head"]
_STATIC: Final = ("tensor", "layer", "head")
_PAGED: Final = ("page", "page_head")
_PLACES: Final = ("offset", "layer_stride", "kv_stride", "block_stride", "head_stride")
_NAMES: Final = {"l": "layer", "2": "kv", "b": "block", "h": "head"}


@dataclass(frozen=True, slots=True)
class Quantization:
    """How stored elements become values: ``value = stored * scale``, in float32.

    Static scales belong to the model and are known when the cache is registered; they travel with the layout.
    Page scales belong to the data and are computed when a page is written; they lie in the region beside the
    pages and travel with them. Make one with `per_tensor`, `per_layer` or `per_head`; `KVLayout.from_tensor`
    reads page scales off a tensor.

    Attributes
    ----------
    per
        The unit that has a scale of its own: ``"tensor"`` (the whole cache), ``"layer"`` (each layer, K and
        V), ``"head"`` (each head of each layer, K and V), ``"page"`` (each block of a layer, K and V) or
        ``"page_head"`` (each head of such a block).
    scales
        Static scales, row-major, only for this rank: 1, num_layers × num_kv, or num_layers × num_kv ×
        num_heads numbers. They are rounded to float32. Empty for page scales.
    offset, layer_stride, kv_stride, block_stride, head_stride
        Position of page scales, in bytes from the region's base. The scale of (layer, kv, block, head), with
        layer and head counted within the rank, is a float32 at ``offset + layer * layer_stride + kv *
        kv_stride + block * block_stride + head * head_stride``. 0 for an axis of one element, and
        ``head_stride`` for ``"page"``.
    saturate
        Whether values that are too large for the stored type, infinities among them, become its largest
        number, as engines' own fp8 caches do. Otherwise they become NaN (e4m3fn) or infinity (e5m2, float16),
        as in ml_dtypes. NaN stays NaN. A cache without a quantization saturates where its type has a smaller
        range than what comes in; to have NaN there, give it ``Quantization.per_tensor(1, saturate=False)``.
    """

    per: Per
    scales: tuple[float, ...] = ()
    offset: int = 0
    layer_stride: int = 0
    kv_stride: int = 0
    block_stride: int = 0
    head_stride: int = 0
    saturate: bool = True

    def __post_init__(self) -> None:
        if self.per not in _STATIC + _PAGED:
            raise invalid(f"quantization is per {self.per!a:.32}, not one of {', '.join(_STATIC + _PAGED)}")
        for name in _PLACES:
            try:
                object.__setattr__(self, name, operator.index(getattr(self, name)))
            except TypeError:
                kind = type(getattr(self, name)).__name__
                raise invalid(f"quantization field {name} is a {kind}, not an integer") from None
        with np.errstate(over="ignore", under="ignore"):  # checked below
            rounded = np.array(self.scales, np.float32)
        object.__setattr__(self, "scales", tuple(rounded.tolist()))
        if self.in_memory:
            if self.scales:
                raise invalid(
                    f"quantization per {self.per} reads its scales from the region, but {len(self.scales)} "
                    "static scales are given"
                )
            if self.per == "page" and self.head_stride:
                raise invalid(f'head_stride of scales per page is {self.head_stride}, not 0: use "page_head"')
            return
        if not self.scales:
            raise invalid(f"quantization per {self.per} has no scales")
        if placed := [name for name in _PLACES if getattr(self, name)]:
            raise invalid(f"quantization per {self.per} has static scales, so {', '.join(placed)} must be 0")
        refused = np.flatnonzero(~(np.isfinite(rounded) & (rounded > 0)))
        if len(refused):
            raise invalid(
                f"scale {refused[0]} of {len(rounded)} is {rounded[refused[0]]} as float32, but a scale must "
                "be finite and above 0"
            )

    # ---- making one -------------------------------------------------------------------------

    @classmethod
    def per_tensor(cls, scale: float, *, saturate: bool = True) -> Quantization:
        """Returns one scale for the whole cache."""
        try:
            scales = (float(scale),)
        except (TypeError, ValueError):
            raise invalid(f"scale must be a number above 0, not {scale!r:.200}") from None
        return cls("tensor", scales, saturate=saturate)

    @classmethod
    def per_layer(cls, scales: ArrayLike, *, saturate: bool = True) -> Quantization:
        """Returns one scale for each (layer of this rank, kv), from an array [num_layers, num_kv]."""
        return cls("layer", _numbers(scales, "layer", "[num_layers, num_kv]", 2), saturate=saturate)

    @classmethod
    def per_head(cls, scales: ArrayLike, *, saturate: bool = True) -> Quantization:
        """Returns one scale for each (layer, kv, head) of this rank, from [num_layers, num_kv, num_heads]."""
        return cls("head", _numbers(scales, "head", "[num_layers, num_kv, num_heads]", 3), saturate=saturate)

    @classmethod
    def of_views(
        cls,
        views: list[TensorView],
        axes: str,
        *,
        base: int,
        counts: Mapping[str, int],
        saturate: bool = True,
    ) -> Quantization:
        """Reads page scales off float32 tensors: one tensor for all layers, or one for each.

        Parameters
        ----------
        views
            One view if `axes` has ``l`` or the rank has one layer; otherwise one view for each layer, evenly
            apart.
        axes
            Letters of each axis of a view: ``l 2 b h``; with ``h`` each head has its own scale. An axis that
            has one element in the layout may be left out.
        base
            Address from which offsets count.
        counts
            Counts of the layout's axes, by letter.
        """
        seen = views[0]
        for index, other in enumerate(views):
            if other.dtype != "float32":
                raise invalid(f"scales must be float32, but tensor {index} of the scales is {other.dtype}")
            if (other.shape, other.strides) != (seen.shape, seen.strides):
                raise invalid(
                    f"scales of layer {index} have shape {other.shape} and strides {other.strides}, but "
                    f"those of layer 0 {seen.shape} and {seen.strides}"
                )
        if len(axes) != len(seen.shape) or len(set(axes)) != len(axes) or set(axes) - set(_NAMES):
            raise invalid(
                f'scale_axes "{axes}" do not fit a tensor of shape {seen.shape}: write one of the letters l '
                "2 b h for each axis, each once"
            )
        strides = dict.fromkeys(_NAMES, 0)
        shape = dict.fromkeys(_NAMES, 1)
        for letter, count, stride in zip(axes, seen.shape, seen.strides, strict=True):
            shape[letter], strides[letter] = count, stride if count > 1 else 0
        if len(views) > 1:
            if "l" in axes:
                raise invalid(
                    f"{len(views)} tensors of scales are one for each layer, so they cannot have axis l "
                    f'("{axes}")'
                )
            shape["l"], strides["l"] = len(views), views[1].address - seen.address
            gaps = {b.address - a.address for a, b in itertools.pairwise(views)}
            if gaps != {strides["l"]} or strides["l"] < 0:
                raise invalid(
                    f"scales of {len(views)} layers do not lie at equal steps in ascending order "
                    f"({min(gaps)} to {max(gaps)} bytes from one to the next): allocate the scales of all "
                    "layers in one tensor"
                )
        for letter, name in _NAMES.items():
            if shape[letter] != counts[letter] and (letter != "h" or "h" in axes):
                raise invalid(
                    f"scales have {shape[letter]} along axis {letter}, but the layout has {counts[letter]} "
                    f"{name}s: the scales' shape is {seen.shape}, scale_axes are "
                    f'"{axes}"'
                )
        return cls(
            "page_head" if "h" in axes else "page",
            offset=seen.address - base,
            layer_stride=strides["l"],
            kv_stride=strides["2"],
            block_stride=strides["b"],
            head_stride=strides["h"],
            saturate=saturate,
        )

    # ---- reading it --------------------------------------------------------------------------

    @property
    def in_memory(self) -> bool:
        """Whether the scales lie in the region (per page), rather than in the layout."""
        return self.per in _PAGED

    def table(self, num_layers: int, num_kv: int, num_heads: int) -> NDArray[np.float32]:
        """Returns the static scales of every (layer, kv, head), [num_layers, num_kv, num_heads].

        Raises
        ------
        UsageError
            ``invalid-argument``: the scales are page scales, or their number does not fit.
        """
        if self.in_memory:
            raise invalid(f"scales per {self.per} are in the region's memory, not in the layout")
        wanted = self.num_scales(num_layers, num_kv, num_heads)
        if len(self.scales) != wanted:
            raise invalid(
                f"{len(self.scales)} scales are given per {self.per}, but {wanted} are needed for "
                f"{num_layers} layers × {num_kv} kv" + (f" × {num_heads} heads" if self.per == "head" else "")
            )
        shape = {"tensor": (1, 1, 1), "layer": (num_layers, num_kv, 1)}.get(
            self.per, (num_layers, num_kv, num_heads)
        )
        scales = np.array(self.scales, np.float32).reshape(shape)
        return np.broadcast_to(scales, (num_layers, num_kv, num_heads))

    def num_scales(self, num_layers: int, num_kv: int, num_heads: int) -> int:
        """Returns how many static scales a rank of that size has; 0 for page scales."""
        return {"tensor": 1, "layer": num_layers * num_kv, "head": num_layers * num_kv * num_heads}.get(
            self.per, 0
        )


def _numbers(scales: ArrayLike, per: str, words: str, ndim: int) -> tuple[float, ...]:
    array = np.asarray(scales, np.float64)
    if array.ndim != ndim:
        raise invalid(f"scales per {per} must be an array {words}, but have shape {array.shape}")
    return tuple(array.ravel().tolist())


# ---- sending it ---------------------------------------------------------------------------------


def _write_scales(scales: tuple[float, ...]) -> str:
    # Base64 instead of decimal numbers: both ends must compute with the same 32 bits. At 5.4 letters a scale,
    # the scales of 80 layers, K and V, 64 heads fit into a layout's 64 KiB.
    import base64  # few layouts have scales to send

    return base64.b64encode(np.array(scales, "<f4").tobytes()).decode()


def _read_scales(value: Any) -> tuple[float, ...]:
    import base64

    try:
        decoded = base64.b64decode(text(value), validate=True)
        return tuple(np.frombuffer(decoded, "<f4").tolist())
    except ValueError:  # binascii's error is one
        raise ValueError("is not base64 of float32 numbers") from None


QUANTIZATION_SCHEMA: Final = Schema(
    what="layout",
    key="",
    version=0,
    fields=(
        Field("per", text, MANDATORY),
        Field("scales", _read_scales, (), write=_write_scales),
        *(Field(name, integer, 0) for name in _PLACES),
        # What is left out says False, as with versions in which that was the default.
        Field("saturate", flag, False),
    ),
)
