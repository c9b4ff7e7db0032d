"""Computes what a transfer must do, by simple index arithmetic over the fields of two layouts.

Nothing here comes from the planner: no unit, no loop, no merged run. A sequence is walked token by
token, and the byte of each element is computed from the layout's strides, one element at a time in
thought and one array at a time in numpy. Slow, short, and meant to be believed by reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvxfer.layout.kv_layout import KVLayout

Bytes = NDArray[np.uint8]
Offsets = NDArray[np.int64]
Scalar = TypeVar("Scalar", bound=np.generic)


class RefusedError(Exception):
    """The transfer is a mistake of the caller; the message says which."""


# ---- where an element lies ----------------------------------------------------------------------


def local_token(layout: KVLayout, token: int) -> int | None:
    """Returns the index of `token` among those that this rank holds, or None if it does not hold it."""
    if token // layout.cp_interleave % layout.cp_size != layout.cp_rank:
        return None
    return token // (layout.cp_interleave * layout.cp_size) * layout.cp_interleave + (
        token % layout.cp_interleave
    )


def num_local_tokens(layout: KVLayout, num_tokens: int) -> int:
    """Returns how many of the first `num_tokens` tokens of a sequence this rank holds."""
    return sum(local_token(layout, token) is not None for token in range(num_tokens))


def origins(layout: KVLayout) -> Offsets:
    """Returns the byte of element (block 0, token 0, head 0, dim 0), [num_layers, num_kv]."""
    table = np.empty((layout.num_layers, layout.num_kv), np.int64)
    for layer in range(layout.num_layers):
        for kv in range(layout.num_kv):
            if layout.offsets:
                table[layer, kv] = layout.offsets[layer * layout.num_kv + kv]
            else:
                table[layer, kv] = layout.offset + layer * layout.layer_stride + kv * layout.kv_stride
    return table


def element_offsets(layout: KVLayout, blocks: Sequence[int], slots: Sequence[int]) -> Offsets:
    """Returns the first byte of every element of some tokens.

    Parameters
    ----------
    blocks, slots
        Where each token lies: its physical block, and its place within the block, [num_tokens].

    Returns
    -------
    Offsets
        [num_layers, num_kv, num_tokens, num_heads, head_dim]
    """
    tokens = (
        np.array(blocks, np.int64) * layout.block_stride + np.array(slots, np.int64) * layout.token_stride
    )
    heads = np.arange(layout.num_heads, dtype=np.int64) * layout.head_stride
    dims = np.arange(layout.head_dim, dtype=np.int64) * layout.dim_stride
    first: Offsets = (
        origins(layout)[:, :, None, None, None]
        + tokens[None, None, :, None, None]
        + heads[None, None, None, :, None]
        + dims[None, None, None, None, :]
    )
    return first


def byte_offsets(layout: KVLayout, blocks: Sequence[int], slots: Sequence[int]) -> Offsets:
    """Returns every byte of those elements, [..., itemsize]."""
    first = element_offsets(layout, blocks, slots)
    every: Offsets = first[..., None] + np.arange(layout.itemsize, dtype=np.int64)
    return every


def extent(layout: KVLayout) -> int:
    """Returns the bytes from the region's base to the end of the element that lies last."""
    last = element_offsets(layout, [layout.num_blocks - 1], [layout.block_tokens - 1])
    return int(last.max()) + layout.itemsize


# ---- what is in it ------------------------------------------------------------------------------


def _hash(key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # The finalizer of splitmix64: neighbouring keys share no bit pattern.
    with np.errstate(over="ignore"):
        key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashed: NDArray[np.uint64] = key ^ (key >> np.uint64(31))
    return hashed


def poison(nbytes: int, seed: int) -> Bytes:
    """Returns memory as before any write: every byte depends on its position."""
    keys = np.arange(nbytes, dtype=np.uint64) + np.uint64(0xFACE_0000_0000 + (seed << 32))
    return _hash(keys).astype(np.uint8)


def values(layout: KVLayout, tokens: Sequence[int]) -> Bytes:
    """Returns the bytes that the model has for this rank's heads and layers of some tokens.

    They depend on (layer, kv, token, head, dim, byte) in the model's numbering alone, so that
    every rank that holds an element agrees on it.

    Returns
    -------
    Bytes
        [num_layers, num_kv, num_tokens, num_heads, head_dim, itemsize]
    """
    # Each axis has its own bits, 45 of them below the layer's, so no two elements share a key.
    key = np.zeros((), np.uint64)
    for index, bound in (
        (np.arange(layout.num_layers) + layout.first_layer, 1),
        (np.arange(layout.num_kv), 2),
        (np.array(tokens, np.int64), 1 << 20),
        (np.arange(layout.num_heads) + layout.first_head, 1 << 10),
        (np.arange(layout.head_dim), 1 << 10),
        (np.arange(layout.itemsize), 16),
    ):
        key = key[..., None] * np.uint64(bound) + index.astype(np.uint64)
    return _hash(key + np.uint64(1)).astype(np.uint8)


@dataclass(frozen=True)
class Held:
    """The tokens that one table of one rank names.

    Attributes
    ----------
    tokens
        Positions in the sequence, ascending, without those in null blocks.
    blocks, slots
        Where each lies.
    content
        The token whose values lie there: the token itself, or the first token of the block if the block is
        named twice (a shared prefix).
    """

    tokens: list[int]
    blocks: list[int]
    slots: list[int]
    content: list[int]


def held(layout: KVLayout, table: Sequence[int]) -> Held:
    """Walks a block table from token 0 to its end."""
    found = Held([], [], [], [])
    first_at: dict[tuple[int, int], int] = {}
    for local in range(len(table) * layout.block_tokens):
        block, slot = table[local // layout.block_tokens], local % layout.block_tokens
        if block == layout.null_block:
            continue
        # The token whose local index is `local`.
        turn, within = divmod(local, layout.cp_interleave)
        token = (turn * layout.cp_size + layout.cp_rank) * layout.cp_interleave + within
        found.tokens.append(token)
        found.blocks.append(block)
        found.slots.append(slot)
        found.content.append(first_at.setdefault((block, slot), token))
    return found


def fill(layout: KVLayout, memory: Bytes, table: Sequence[int]) -> None:
    """Writes this rank's share of the sequence that `table` names into a region's memory."""
    there = held(layout, table)
    memory[byte_offsets(layout, there.blocks, there.slots)] = values(layout, there.content)


# ---- what a transfer changes --------------------------------------------------------------------


@dataclass(frozen=True)
class Moves:
    """The tokens that a transfer moves, and where they lie at both ends; one list an attribute."""

    tokens: list[int]
    src_blocks: list[int]
    src_slots: list[int]
    dst_blocks: list[int]
    dst_slots: list[int]


def moves(
    src: KVLayout,
    dst: KVLayout,
    src_table: Sequence[int],
    dst_table: Sequence[int],
    tokens: range | None,
) -> Moves:
    """Walks the sequence token by token.

    Parameters
    ----------
    tokens
        The positions to move; None for all that both tables name.

    Raises
    ------
    RefusedError
        A token of the range that an end should hold lies behind the end of its table, or a null block would
        be the source of a real one.
    """
    found = Moves([], [], [], [], [])
    if tokens is None:
        bound = max(
            len(table) * layout.block_tokens * layout.cp_size + layout.cp_interleave * layout.cp_size
            for layout, table in ((src, src_table), (dst, dst_table))
        )
    for token in range(bound) if tokens is None else tokens:
        at_src, at_dst = local_token(src, token), local_token(dst, token)
        if at_src is None or at_dst is None:
            continue
        src_page, dst_page = at_src // src.block_tokens, at_dst // dst.block_tokens
        if src_page >= len(src_table) or dst_page >= len(dst_table):
            if tokens is None:
                continue
            raise RefusedError(f"token {token} is behind the end of a table")
        if dst_table[dst_page] == dst.null_block:
            continue
        if src_table[src_page] == src.null_block:
            raise RefusedError(f"token {token} comes from a null block")
        found.tokens.append(token)
        found.src_blocks.append(src_table[src_page])
        found.src_slots.append(at_src % src.block_tokens)
        found.dst_blocks.append(dst_table[dst_page])
        found.dst_slots.append(at_dst % dst.block_tokens)
    return found


def common_layers(src: KVLayout, dst: KVLayout) -> list[int]:
    """Returns the model's layers that both ends hold."""
    theirs = set(range(src.first_layer, src.first_layer + src.num_layers))
    return [x for x in range(dst.first_layer, dst.first_layer + dst.num_layers) if x in theirs]


def common_heads(src: KVLayout, dst: KVLayout, heads: range | None = None) -> list[int]:
    """Returns the model's heads that both ends hold, only those of `heads` if it is given."""
    theirs = set(range(src.first_head, src.first_head + src.num_heads))
    mine = range(dst.first_head, dst.first_head + dst.num_heads)
    return [x for x in mine if x in theirs and (heads is None or x in heads)]


def cut(
    every: NDArray[Scalar], layout: KVLayout, layers: Sequence[int], heads: Sequence[int]
) -> NDArray[Scalar]:
    """Returns the part of ``[layer, kv, token, head, ...]`` of some of the model's layers and heads."""
    rows = np.array(layers, np.int64) - layout.first_layer
    columns = np.array(heads, np.int64) - layout.first_head
    return every[rows][:, :, :, columns]


def source_map(
    src: KVLayout,
    dst: KVLayout,
    moved: Moves,
    dst_nbytes: int,
    *,
    layers: Sequence[int] | None = None,
    heads: range | None = None,
) -> Offsets:
    """Returns for each byte of the destination's memory the byte that it comes from, -1 for none.

    For layouts of one dtype, whose bytes move as they are.
    """
    both = common_layers(src, dst)
    wanted = [x for x in both if layers is None or x in layers]
    columns = common_heads(src, dst, heads)
    origin = np.full(dst_nbytes, -1, np.int64)
    to = cut(byte_offsets(dst, moved.dst_blocks, moved.dst_slots), dst, wanted, columns)
    origin[to] = cut(byte_offsets(src, moved.src_blocks, moved.src_slots), src, wanted, columns)
    return origin


def expected(
    src: KVLayout,
    dst: KVLayout,
    moved: Moves,
    src_table: Sequence[int],
    dst_memory: Bytes,
    *,
    layers: Sequence[int] | None = None,
    heads: range | None = None,
) -> Bytes:
    """Returns what the destination's memory is after the transfer, from the model's values.

    Only elements change that both ends hold, of tokens that are moved. The source memory is not
    looked at: what lies there is known from its table.
    """
    there = held(src, src_table)
    content = dict(zip(zip(there.blocks, there.slots, strict=True), there.content, strict=True))
    whose = [content[at] for at in zip(moved.src_blocks, moved.src_slots, strict=True)]
    wanted = [x for x in common_layers(src, dst) if layers is None or x in layers]
    columns = common_heads(src, dst, heads)
    after = dst_memory.copy()
    to = cut(byte_offsets(dst, moved.dst_blocks, moved.dst_slots), dst, wanted, columns)
    rows = np.array(wanted, np.int64) - dst.first_layer
    picked = np.array(columns, np.int64) - dst.first_head
    after[to] = values(dst, whose)[rows][:, :, :, picked]
    return after


# ---- words --------------------------------------------------------------------------------------


def describe_layout(name: str, layout: KVLayout) -> str:
    """Describes a layout in a line or two, without the fields that have their defaults."""
    counts = (
        f"{name}: {layout.dtype} of {layout.itemsize} B, {layout.num_blocks} blocks of {layout.block_tokens} "
        f"tokens, layers {layout.first_layer}+{layout.num_layers} of {layout.total_layers}, "
        f"heads {layout.first_head}+{layout.num_heads} of {layout.total_heads}, "
        f"kv {layout.num_kv}, dim {layout.head_dim}"
    )
    steps = f"strides b {layout.block_stride} t {layout.token_stride} h {layout.head_stride}"
    steps += f" d {layout.dim_stride}"
    if layout.offsets:
        steps += f", offsets {list(layout.offsets)}"
    else:
        steps += f", offset {layout.offset} l {layout.layer_stride} kv {layout.kv_stride}"
    if layout.cp_size > 1:
        steps += f", cp rank {layout.cp_rank} of {layout.cp_size} by {layout.cp_interleave}"
    if layout.null_block >= 0:
        steps += f", null block {layout.null_block}"
    if layout.quantization is not None:
        steps += f", {layout.quantization}"
    return f"{counts}\n    {steps}"


def describe_byte(layout: KVLayout, table: Sequence[int], byte: int) -> str:
    """Names the element that a byte belongs to (layer, kv, token, head, dim), or says that there is none."""
    blocks = [b for b in range(layout.num_blocks) for _ in range(layout.block_tokens)]
    slots = [t for _ in range(layout.num_blocks) for t in range(layout.block_tokens)]
    every = byte_offsets(layout, blocks, slots)
    hits = np.argwhere(every == byte)
    if not len(hits):
        return f"byte {byte}, which is no element's (padding, or outside)"
    layer, kv, at, head, dim, part = (int(x) for x in hits[0])
    block, slot = blocks[at], slots[at]
    words = (
        f"byte {byte}: layer {layer + layout.first_layer}, {'KV'[kv] if layout.num_kv == 2 else 'kv 0'}, "
        f"block {block} slot {slot}, head {head + layout.first_head}, dim {dim}, byte {part} of the element"
    )
    there = held(layout, table)
    tokens = [
        t for t, b, s in zip(there.tokens, there.blocks, there.slots, strict=True) if (b, s) == (block, slot)
    ]
    return f"{words}; {'token ' + ', '.join(map(str, tokens)) if tokens else 'not of this sequence'}"


def first_difference(
    what: str, layout: KVLayout, table: Sequence[int], got: NDArray[np.generic], wanted: NDArray[np.generic]
) -> str | None:
    """Describes the first wrong byte of a destination; None if all are right."""
    wrong = np.flatnonzero(got != wanted)
    if not len(wrong):
        return None
    at = int(wrong[0])
    return (
        f"{what}: {len(wrong)} bytes are wrong, the first is {describe_byte(layout, table, at)}: "
        f"{got[at]} instead of {wanted[at]}"
    )
