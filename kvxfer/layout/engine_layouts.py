"""Layouts from serving engines' descriptions of their caches. Reads only attributes of their objects.

If the engine has tensors (vLLM's ``register_kv_caches``), use `KVLayout.from_tensors`, because the strides of
tensors are reliable: axes ``"bhtc"`` for [block, head, token, K and V], ``"2bthd"`` and ``"b2thd"`` for
vLLM's older layouts. The functions here take descriptions: pointers, item lengths and strides. Use them
before a tensor exists, or where none is available.

These descriptions do not contain a rank's slice. Compute it with `kvxfer.layout.slices`, and pass it as
``first_head=``, ``total_heads=``, ``first_layer=``, ``total_layers=``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Literal, Unpack

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import invalid
from kvxfer.layout.axes import Axes, regular_or_listed
from kvxfer.layout.kv_layout import Held, KVLayout, complete
from kvxfer.layout.tensor import dtype_name, dtype_of, view

#: Orders of vLLM's axes: Layer, Block, Head, tokeN, Content (keys, then values), outermost first.
VLLM_ORDERS: Final = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
# vLLM's block pool keeps block 0 for "no block" and never hands it out.
_VLLM_NULL_BLOCK: Final = 0
# Values follow the keys of each token (row), of each head's page (plane), or of all heads (heads).
Values = Literal["row", "plane", "heads"]
_VALUES: Final = {"row": ("C", "2d"), "plane": ("NC", "2td"), "heads": ("H", "2h")}


# ---- vLLM ---------------------------------------------------------------------------------------


def vllm(
    tensor: Any,
    spec: Any,
    order: str,
    *,
    num_blocks: int,
    latent: bool = False,
    values: Values = "row",
    dtype: Any = None,
    **held: Unpack[Held],
) -> KVLayout:
    """Returns the layout of one of vLLM's ``KVCacheTensor``s; offsets count from its allocation's first byte.

    Parameters
    ----------
    tensor
        Has ``size``, ``layers``, ``layer_stride``, ``block_stride`` and ``offset``: the page of (layer
        l, block b) begins at ``offset + l * layer_stride + b * block_stride``. A block stride longer
        than the page is padding.
    spec
        Of these layers: ``block_size``, ``num_kv_heads`` (this rank's), ``head_size``, ``dtype``. A spec with
        ``shapes`` and ``dtypes`` (Mamba, gated delta net) becomes one opaque row for each block.
    order
        One of `VLLM_ORDERS` (``kv_cache_config.kv_cache_layout``).
    num_blocks
        Of ``kv_cache_config``.
    latent
        Whether a token has one vector and no separate values: MLA's latent part, then its rope part.
    values
        Where values lie: ``"row"`` behind the keys of their token (C is keys then values),
        ``"plane"`` behind the keys of all tokens of their head in the page, ``"heads"`` behind all
        heads of keys (``separate_kv_head_groups``).
    dtype
        The real element type if ``spec.dtype`` is a stand-in: ``"fp8"`` for uint8. As in
        `KVLayout.from_tensor`.
    **held
        As in `KVLayout.from_tensor`. ``null_block`` is 0 unless given.

    Raises
    ------
    UsageError
        ``invalid-argument``: an unknown order, pages that overlap, or that reach beyond ``size``.
    """
    where = [(tensor, number) for number in range(len(tensor.layers))]
    return _vllm(where, spec, order, num_blocks, latent, values, dtype, held)


def vllm_group(
    config: Any,
    index: int,
    order: str | None = None,
    *,
    latent: bool = False,
    values: Values = "row",
    dtype: Any = None,
    **held: Unpack[Held],
) -> KVLayout:
    """Returns the layout of one cache group of vLLM's ``KVCacheConfig``: layers with one block table.

    Groups may share memory, because a block id belongs to one group at a time. Register each group as a
    region of its own over that memory. Layers are numbered within the group.

    Parameters
    ----------
    config
        Has ``num_blocks``, ``kv_cache_tensors`` and ``kv_cache_groups``.
    index
        Of the group.
    order
        None takes ``config.kv_cache_layout``.
    latent, values, dtype, **held
        As in `vllm`; name the group with ``group=``.

    Raises
    ------
    UsageError
        As in `vllm`. Also if the order is unknown, if the group's layers differ, or if a layer is in no
        tensor.
    """
    group = config.kv_cache_groups[index]
    order = order or getattr(config, "kv_cache_layout", None)
    if order is None:
        raise invalid(f"this config has no kv_cache_layout: pass order=, one of {', '.join(VLLM_ORDERS)}")
    places = {name: (item, i) for item in config.kv_cache_tensors for i, name in enumerate(item.layers)}
    if missing := [name for name in group.layer_names if name not in places]:
        raise invalid(
            f"layers {', '.join(missing[:8])} of group {index} are not in any of the kv_cache_tensors"
        )
    spec = group.kv_cache_spec
    if (each := getattr(spec, "kv_cache_specs", None)) is not None:
        specs = [each[name] for name in group.layer_names]
        for name, other in zip(group.layer_names, specs, strict=True):
            if other != specs[0]:
                raise invalid(
                    f"layer {name} of group {index} has another spec than {group.layer_names[0]}: layers of "
                    "one region must be alike, so make a layout for each kind with vllm"
                )
        spec = specs[0]
    where = [places[name] for name in group.layer_names]
    return _vllm(where, spec, order, config.num_blocks, latent, values, dtype, held)


def _vllm(
    where: list[tuple[Any, int]],
    spec: Any,
    order: str,
    num_blocks: int,
    latent: bool,
    values: Values,
    dtype: Any,
    held: Held,
) -> KVLayout:
    """Makes the layout; `where` gives for each layer its tensor, and its index among that tensor's layers."""
    if order not in VLLM_ORDERS:
        raise invalid(f"order {order!r} is not one of {', '.join(VLLM_ORDERS)}")
    parts = []
    size = min(int(tensor.size) for tensor, _ in where)
    for tensor in {id(tensor): tensor for tensor, _ in where}.values():
        shapes = getattr(spec, "shapes", None)
        if shapes is not None:
            part, dtype, itemsize = _row(_state_nbytes(spec), tensor, num_blocks), "opaque", 1
        else:
            name, itemsize = dtype_of(spec.dtype)
            dtype = name if dtype is None else dtype_name(dtype)
            part = _pages(tensor, spec, order, num_blocks, latent, values, itemsize)
        parts.append(part)
    first = parts[0]
    for other in parts:
        if other.strides != first.strides:
            raise invalid(
                f"layers of one group have strides {first.strides} and {other.strides} bytes: layers of one "
                "region must be alike, so make a layout for each tensor with vllm"
            )
    table = np.array([[t.offset + i * t.layer_stride] for t, i in where], np.int64)
    num_kv = first.counts["2"]
    table = table + np.arange(num_kv, dtype=np.int64) * first.strides["2"]
    layout = _layout(dtype, itemsize, first, table, {"null_block": _VLLM_NULL_BLOCK, **held})
    if layout.elements_nbytes > size:
        raise invalid(
            f"pages of {len(where)} layers × {num_blocks} blocks end at byte {layout.elements_nbytes}, but "
            f"the tensor has {size} (block_stride {first.strides['b']}): check whether {order} is its order"
        )
    return layout


def _pages(
    tensor: Any, spec: Any, order: str, num_blocks: int, latent: bool, values: Values, itemsize: int
) -> Axes:
    """Makes strides within a layer: the given ones for layers and blocks, dense ones for all other axes."""
    head_dim = int(spec.head_size)
    values_dim = int(getattr(spec, "head_size_v", None) or head_dim)
    if not latent and values_dim != head_dim:
        # Keys and values of different sizes form one row, which moves as a whole.
        latent, head_dim = True, head_dim + values_dim
    letters = order
    if not latent:
        if values not in _VALUES or _VALUES[values][0] not in order:
            raise invalid(f"values {values!r} do not fit order {order}: use row, heads, or plane with ...NC")
        letters = order.replace(*_VALUES[values])
    letters = "".join({"L": "l", "B": "b", "H": "h", "N": "t", "C": "d"}.get(x, x) for x in letters)
    part = Axes()
    counts = {
        "l": len(tensor.layers),
        "b": num_blocks,
        "h": int(spec.num_kv_heads),
        "t": int(spec.block_size),
        "2": 2,
        "d": head_dim,
    }
    given = {"l": int(tensor.layer_stride), "b": int(tensor.block_stride)}
    stride = itemsize
    for letter in reversed(letters):
        stride = given.get(letter, stride)
        if letter != "l":
            part.put(letter, counts[letter], stride)
        stride *= counts[letter]
    return part


def _state_nbytes(spec: Any) -> int:
    return sum(
        math.prod(shape) * dtype_of(dtype)[1] for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )


def _row(nbytes: int, tensor: Any, num_blocks: int) -> Axes:
    part = Axes()
    part.put("b", num_blocks, int(tensor.block_stride))
    part.put("d", nbytes, 1)
    return part


# ---- SGLang -------------------------------------------------------------------------------------


def sglang(
    data_ptrs: Sequence[int],
    data_lens: Sequence[int],
    item_lens: Sequence[int],
    *,
    page_size: int,
    num_heads: int,
    head_dim: int,
    dtype: Any,
    latent: bool = False,
    **held: Unpack[Held],
) -> KVLayout:
    """Returns the layout of SGLang's ``KVArgs``: rows of tokens, K and V of every layer apart.

    Offsets count from the lowest pointer, so register all of the memory together.

    Parameters
    ----------
    data_ptrs, data_lens, item_lens
        ``kv_data_ptrs``, ``kv_data_lens``, ``kv_item_lens``: where each buffer begins, its bytes and
        the bytes of a page in it. Keys of all layers come first, then values of all layers.
    page_size
        Tokens of a page. The rows of a page are [token, head, dim].
    num_heads, head_dim
        KV heads of this rank, and elements of one; 1 and latent plus rope for MLA.
    dtype
        A name, or a dtype of torch or numpy.
    latent
        Whether the cache is MLA's: one buffer a layer.

    Raises
    ------
    UsageError
        ``invalid-argument`` if lengths and pages do not fit; the message has the numbers.
    """
    name, itemsize = dtype_of(dtype)
    num_blocks = _num_items(data_ptrs, data_lens, item_lens)
    num_kv = 1 if latent else 2
    if len(data_ptrs) % num_kv:
        raise invalid(
            f"{len(data_ptrs)} buffers cannot be keys and values of whole layers: check whether the cache is "
            "latent"
        )
    wanted = page_size * num_heads * head_dim * itemsize
    if item_lens[0] != wanted:
        raise invalid(
            f"a page has {item_lens[0]} bytes, but {page_size} tokens × {num_heads} heads × {head_dim} dim "
            f"× {itemsize} bytes ({name}) are {wanted}"
        )
    part = Axes()
    for letter, count, stride in (
        ("b", num_blocks, wanted),
        ("t", page_size, num_heads * head_dim * itemsize),
        ("h", num_heads, head_dim * itemsize),
        ("d", head_dim, itemsize),
    ):
        part.put(letter, count, stride)
    # [kv, layers] as SGLang lists them -> [layers, kv].
    table = np.array(data_ptrs, np.int64).reshape(num_kv, -1).T
    return _layout(name, itemsize, part, table - table.min(), held)


def opaque_rows(
    data_ptrs: Sequence[int], data_lens: Sequence[int], item_lens: Sequence[int], **held: Unpack[Held]
) -> KVLayout:
    """Returns the layout of states that move as a whole (Mamba, GDN): one opaque row a block.

    Parameters are as in `sglang` (``state_data_ptrs`` and so on), one buffer a layer. Shards over
    tensor-parallel ranks are not slices of heads. Give ``first_head=tp_rank, total_heads=tp_size`` for them:
    a shard then matches only the same shard.
    """
    num_blocks = _num_items(data_ptrs, data_lens, item_lens)
    part = Axes()
    part.put("b", num_blocks, int(item_lens[0]))
    part.put("d", int(item_lens[0]), 1)
    table = np.array(data_ptrs, np.int64)[:, None]
    return _layout("opaque", 1, part, table - table.min(), held)


def _num_items(ptrs: Sequence[int], lens: Sequence[int], item_lens: Sequence[int]) -> int:
    if not len(ptrs) == len(lens) == len(item_lens) or not len(ptrs):
        raise invalid(
            f"{len(ptrs)} pointers, {len(lens)} lengths and {len(item_lens)} item lengths were given"
        )
    for i, (nbytes, item) in enumerate(zip(lens, item_lens, strict=True)):
        if item != item_lens[0] or nbytes != lens[0]:
            raise invalid(
                f"buffer {i} has {nbytes} bytes in items of {item}, but buffer 0 has {lens[0]} in items of "
                f"{item_lens[0]}: layers of one region must be alike, so make a layout for each group"
            )
    if item_lens[0] < 1 or lens[0] < item_lens[0]:
        raise invalid(f"a buffer of {lens[0]} bytes does not hold an item of {item_lens[0]} bytes")
    return int(lens[0] // item_lens[0])


# ---- TensorRT-LLM -------------------------------------------------------------------------------


def trtllm(
    pool: Any,
    *,
    num_heads: int,
    block_tokens: int,
    head_dim: int,
    dtype: Any = None,
    **held: Unpack[Held],
) -> KVLayout:
    """Returns the layout of TensorRT-LLM's pool, one tensor [blocks, layers, 2, heads * tokens * dim].

    Parameters
    ----------
    pool
        Of four axes; the third is 1 for MLA. Register the same tensor.
    num_heads, block_tokens, head_dim
        Of this rank: the last axis is [head, token, dim].
    dtype
        The real element type, if the tensor's type is a stand-in. As in `KVLayout.from_tensor`.

    Raises
    ------
    UsageError
        ``invalid-argument``: the pool has another shape.
    """
    seen = view(pool)
    row = num_heads * block_tokens * head_dim
    if len(seen.shape) != 4 or seen.shape[2] not in (1, 2) or seen.shape[3] != row:
        raise invalid(
            f"a pool of shape {seen.shape} is not [blocks, layers, 1 or 2, {num_heads} heads × "
            f"{block_tokens} tokens × {head_dim} dim = {row}]"
        )
    num_blocks, num_layers, num_kv, _ = seen.shape
    part = Axes()
    element = seen.strides[3] if row > 1 else seen.itemsize
    for letter, count, stride in (
        ("b", num_blocks, seen.strides[0]),
        ("2", num_kv, seen.strides[2]),
        ("h", num_heads, block_tokens * head_dim * element),
        ("t", block_tokens, head_dim * element),
        ("d", head_dim, element),
    ):
        part.put(letter, count, stride)
    table = np.arange(num_layers, dtype=np.int64)[:, None] * seen.strides[1]
    table = table + np.arange(num_kv, dtype=np.int64) * seen.strides[2]
    name = seen.dtype if dtype is None else dtype_name(dtype)
    return _layout(name, seen.itemsize, part, table, held)


def _layout(dtype: str | None, itemsize: int, part: Axes, table: NDArray[np.int64], held: Held) -> KVLayout:
    num_layers, num_kv = table.shape
    read = {
        "dtype": dtype,
        "itemsize": itemsize,
        "num_layers": num_layers,
        "num_kv": num_kv,
        **regular_or_listed(table),
        **part.block_fields(),
    }
    return KVLayout(**complete(read, held))
