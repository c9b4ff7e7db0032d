"""How (layer, kv, block, token, head, dim) maps to bytes of a region."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any, Final, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import invalid
from kvxfer.layout.geometry import Geometry, end, end_of_elements, offsets_of_layers
from kvxfer.layout.quantization import QUANTIZATION_SCHEMA, Quantization
from kvxfer.layout.schema import Field, Schema, integer, integers, mapping, text
from kvxfer.layout.validity import integers_of, validate

# Version 1 had no quantization, groups or context parallelism, and its readers required equal versions.
LAYOUT_VERSION: Final = 2
# native/core/control/wire.h: kMaxLayout. 4096 layers of one offset each fit.
MAX_ENCODED_NBYTES: Final = 64 * 1024


class Held(TypedDict, total=False):
    """Keywords of every constructor: `KVLayout`'s attributes that cannot be read off memory."""

    first_layer: int
    total_layers: int | None
    first_head: int
    total_heads: int | None
    quantization: Quantization | None
    null_block: int
    cp_rank: int
    cp_size: int
    cp_interleave: int
    model: str
    group: str


@dataclass(frozen=True, slots=True)
class KVLayout(Geometry):
    """Where each element of a rank's cache lies: strides and offsets in bytes, from the region's base.

    The element (layer l, kv k, block b, token t, head h, dim d) is at
    ``layer_offsets()[l, k] + b * block_stride + t * token_stride + h * head_stride + d * dim_stride``
    from the lowest byte that was registered. Make one with `from_tensor` or `from_tensors`, or from
    what an engine says of its cache (`kvxfer.engine_layouts`). LAYOUTS.md explains it with a picture.

    Attributes
    ----------
    dtype
        Name of the element type. float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 and int8
        can be converted into each other; any other is copied as bytes and must be equal at both ends.
    itemsize
        Bytes of an element.
    num_blocks
        Blocks (pages) of the cache; ids are 0 to ``num_blocks - 1``.
    block_tokens
        Tokens of one block; 1 where a block is an opaque state.
    num_kv
        2 where keys and values are told apart, 1 for a latent (MLA) or opaque page.
    head_dim
        Elements of one head of one of K or V.
    first_layer, num_layers, total_layers
        The slice of the model's layers that this rank holds. Layers are numbered model-wide, or
        within the group where one is named.
    first_head, num_heads, total_heads
        The slice of the model's KV heads that this rank holds.
    block_stride, token_stride, head_stride, dim_stride
        Bytes from one index of the axis to the next; 0 for an axis of one element.
    offset, layer_stride, kv_stride
        Where each layer's K or V begins, if the distances are regular.
    offsets
        If they are not regular: one offset for each (layer, kv), layer-major; ``offset``, ``layer_stride``
        and ``kv_stride`` are then 0. Empty otherwise.
    quantization
        The scales that stored elements are multiplied by; None if elements are the values themselves.
    null_block
        A block id that stands for "no block" (vLLM's is 0); -1 if every id is a block.
    cp_rank, cp_size, cp_interleave
        Context parallelism. This rank holds the tokens t of a sequence for which ``(t // cp_interleave) %
        cp_size == cp_rank``, packed, and its block tables count only those.
    model
        Declared name of the model; caches with different names are never connected. "" for undeclared.
    group
        Name of the cache group (``"full"``, ``"sliding"``, ``"mamba"``): layers with a block table of their
        own. "" for undeclared.
    """

    def __post_init__(self) -> None:
        for name, value in integers_of(self).items():
            object.__setattr__(self, name, value)
        validate(self)

    # ---- making one -------------------------------------------------------------------------

    @classmethod
    def from_tensor(
        cls,
        tensor: Any,
        axes: str,
        *,
        dtype: Any = None,
        scales: Any = None,
        scale_axes: str = "",
        saturate: bool = True,
        **held: Unpack[Held],
    ) -> KVLayout:
        """Reads the layout off one tensor that holds the whole cache of this rank.

        Parameters
        ----------
        tensor
            A torch tensor, a numpy array, or anything with DLPack or the buffer protocol, in any
            order of axes and with any positive strides. Only its shape and strides are read.
        axes
            One letter for each axis of `tensor`, in its order: ``l`` layer, ``2`` keys and values, ``b``
            block, ``t`` token, ``h`` head, ``d`` dim. ``c`` in the place of ``d`` means that the axis is keys
            then values, 2 × head_dim, as vLLM lays them out. Without ``2`` and ``c`` the cache has no values
            of its own (MLA: ``"lbtd"``). If ``l``, ``t`` or ``h`` is missing, its count is one.
        dtype
            The real element type, if the tensor's own type is a stand-in (bfloat16 in uint16, float8_e4m3fn
            in uint8): a name, a short name (``"bf16"``, ``"fp8"``), or a dtype of torch or numpy. It decides
            which conversions are possible.
        scales
            Page scales, float32: one tensor, or a list of one for each layer, evenly apart. Offsets of the
            cache and of the scales then count from the lowest byte of both, so register both together:
            ``agent.register("kv", [tensor, scales], layout)``. Static scales go into `quantization` instead,
            and are not registered.
        scale_axes
            One letter for each axis of `scales`: ``l 2 b h``, e.g. ``"l2b"`` for a scale for each
            page and ``"l2bh"`` for each head of a page.
        saturate
            With `scales`: as in `Quantization`.
        **held
            The fields that cannot be read off memory, all optional: ``first_layer``, ``total_layers``,
            ``first_head`` and ``total_heads`` (by default this rank holds the whole model; a slice that does
            not begin at 0 needs the total), ``quantization``, ``null_block``, ``cp_rank``, ``cp_size``,
            ``cp_interleave``, ``model``, ``group``.

        Raises
        ------
        UsageError
            ``invalid-argument`` if the letters do not fit the axes, or the tensor overlaps itself.
        """
        from kvxfer.layout.axes import read_one

        return cls(**complete(read_one(tensor, axes, dtype, scales, scale_axes, saturate), held))

    @classmethod
    def from_tensors(
        cls,
        tensors: Any,
        axes: str,
        *,
        dtype: Any = None,
        scales: Any = None,
        scale_axes: str = "",
        saturate: bool = True,
        **held: Unpack[Held],
    ) -> KVLayout:
        """Reads the layout off several tensors: one for each layer, or keys and values apart.

        Parameters
        ----------
        tensors
            A list, tuple or dict (in its order). Without ``l`` in `axes`: an item for each layer,
            either a tensor or a pair (keys, values). With ``l``: the two tensors (keys, values)
            of all layers. Register the same object, so that offsets count from the same byte.
        axes
            Letters of the axes of each tensor, as in `from_tensor`. All tensors must have the same shape,
            strides and dtype; only their addresses may differ.
        dtype
            As in `from_tensor`.
        scales, scale_axes
            As in `from_tensor`; with `scales`, register ``[tensors, scales]``.
        saturate
            As in `from_tensor`.
        **held
            As in `from_tensor`.
        """
        from kvxfer.layout.axes import read_many

        return cls(**complete(read_many(tensors, axes, dtype, scales, scale_axes, saturate), held))

    # ---- reading it --------------------------------------------------------------------------

    def layer_offsets(self) -> NDArray[np.int64]:
        """Returns the offset of block 0 of each (layer of this rank, kv), [num_layers, num_kv]."""
        return offsets_of_layers(self)

    @property
    def layers(self) -> range:
        """The layers that this rank holds, numbered model-wide."""
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def heads(self) -> range:
        """The KV heads that this rank holds, numbered model-wide."""
        return range(self.first_head, self.first_head + self.num_heads)

    @property
    def page_nbytes(self) -> int:
        """Bytes of the elements of one block in one layer, K and V together."""
        return self.num_kv * self.block_tokens * self.num_heads * self.head_dim * self.itemsize

    @property
    def block_nbytes(self) -> int:
        """Bytes of the elements of one block in all layers of this rank."""
        return self.page_nbytes * self.num_layers

    @property
    def elements_nbytes(self) -> int:
        """Bytes from the region's base to the end of the last element."""
        return end_of_elements(self)

    @property
    def nbytes(self) -> int:
        """Bytes from the region's base to the end of the last element or page scale."""
        return end(self)

    # ---- sending it --------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Returns the layout as versioned JSON of at most 64 KiB; defaults are left out.

        Raises
        ------
        UsageError
            ``invalid-argument`` if listed offsets or static scales make it longer.
        """
        encoded = _SCHEMA.encode(self)
        if len(encoded) > MAX_ENCODED_NBYTES:
            scales = len(self.quantization.scales) if self.quantization else 0
            raise invalid(
                f"this layout takes {len(encoded)} bytes to send ({len(self.offsets)} offsets, {scales} "
                f"scales), but the limit is {MAX_ENCODED_NBYTES}: allocate the layers in one tensor, so that "
                "their offsets are regular, and use one scale for each layer instead of each head"
            )
        return encoded

    @classmethod
    def from_bytes(cls, encoded: bytes) -> KVLayout:
        """Reads what `to_bytes` of this or another version wrote. A peer's bytes are safe to pass.

        Unknown fields of a newer version are ignored, unless the writer marked them as needed to read the
        layout correctly.

        Raises
        ------
        UsageError
            ``invalid-argument``: too long, not JSON, missing, repeated or absurd fields, an unknown field
            that is needed, or a layout that overlaps itself.
        """
        values = _SCHEMA.decode(encoded, MAX_ENCODED_NBYTES, {"quantization": QUANTIZATION_SCHEMA})
        if (scales := values["quantization"]) is not None:
            values["quantization"] = Quantization(**scales)
        return cls(**values)


def complete(read: dict[str, Any], held: Held) -> dict[str, Any]:
    """Returns all fields of a layout: those read off memory, and what the caller says is held.

    Raises
    ------
    UsageError
        ``invalid-argument`` when the quantization is given in both, or a slice lacks the model's total.
    """
    if held.get("quantization") is not None and "quantization" in read:
        raise invalid(
            f"scales per {read['quantization'].per} were read off a tensor, but a quantization was given as "
            "well: pass only one of the two"
        )
    done: dict[str, Any] = {"first_layer": 0, "first_head": 0, **held, **read}
    for what in ("layer", "head"):
        total, first, num = f"total_{what}s", done[f"first_{what}"], done[f"num_{what}s"]
        if done.get(total) is not None:
            continue
        # Without the total, both ends of a pair of ranks could take their slices for whole models.
        if isinstance(first, int | np.integer) and first != 0:
            raise invalid(
                f"first_{what}={first} says that this rank holds a slice of the model's {what}s: pass "
                f"{total}=, the number of {what}s of the whole model"
            )
        done[total] = num  # of a first that is no number the fields' check speaks
    return done


_MANDATORY: Final = [item.name for item in fields(KVLayout) if item.default is MISSING]

# Not needed: model and group. A reader that does not know them compares less, but reads every byte correctly.
_SCHEMA: Final = Schema(
    what="layout",
    key="kvxfer_layout",
    version=LAYOUT_VERSION,
    fields=(
        *(Field(name, text if name == "dtype" else integer) for name in _MANDATORY),
        Field("offset", integer, 0),
        Field("layer_stride", integer, 0),
        Field("kv_stride", integer, 0),
        Field("offsets", integers, ()),
        Field("quantization", mapping, None, needed=True, write=QUANTIZATION_SCHEMA.values_of),
        Field("null_block", integer, -1, needed=True),
        Field("cp_rank", integer, 0, needed=True),
        Field("cp_size", integer, 1, needed=True),
        Field("cp_interleave", integer, 1, needed=True),
        Field("model", text, ""),
        Field("group", text, ""),
    ),
)
