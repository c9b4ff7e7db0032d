"""Describes SGLang's buffers as parts of a cache: keys and values, states, draft layers.

Each part is a region with a layout. SGLang gives a pointer and a length for each buffer, the length of an
item (a page, a row, a state), and the sizes of tensor parallelism. Consecutive buffers of equal shape make
one part, in which each buffer is a layer. All elements are bytes here; the engines compare the types
themselves.

How tensor parallelism divides an item decides the form of its part:

- If it divides by heads, the part has heads, and engines of unequal sizes match by them. Heads are the KV
  heads of token rows, or the channels of a Mamba or GDN state, for each projection of the convolution.
- If it does not divide the item (a latent, an index), every rank holds it whole.
- If SGLang does not say how it divides the item, the part is a shard, which moves only to the same shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, NamedTuple

import kvxfer
from kvxfer import engine_layouts
from kvxfer.connectors.sglang.pointers import memory_at
from kvxfer.layout.kv_layout import Held
from kvxfer.layout.slices import heads_of

#: The component of keys and values; states are numbered from 0 in SGLang's order.
KV: Final = -1

# Kinds of states that every tensor-parallel rank holds whole.
_REPLICATED: Final = frozenset({"dsa", "dsa_tail", "qsa_pending", "qsa_compressed"})
_MAMBA: Final = "mamba"
_SLIDING_WINDOW: Final = "swa"


@dataclass(frozen=True, slots=True)
class CachePart:
    """The part of a rank's cache that makes one region.

    Attributes
    ----------
    name
        The name of the region.
    component
        The component whose block ids it uses: `KV`, or the index of a state in SGLang's order.
    memory
        As `kvxfer.Agent.register` takes it.
    """

    name: str
    component: int
    memory: list[Any]
    layout: kvxfer.KVLayout


@dataclass(frozen=True, slots=True)
class RankSlice:
    """The slice of the model that a rank holds, as far as its buffers do not show it.

    Attributes
    ----------
    tp_rank, tp_size
        The rank in the tensor parallelism of attention.
    state_tp_rank, state_tp_size
        The rank in the tensor parallelism of linear attention's states.
    is_latent
        Whether keys and values are one latent vector, which every rank holds whole.
    total_heads
        KV heads of the model.
    is_staged
        Whether pipeline parallelism divides the layers.
    total_layers
        Layers of the model.
    gpu
        The GPU that holds the buffers; None for host memory.
    model
        The model's declared name.
    """

    tp_rank: int
    tp_size: int
    state_tp_rank: int
    state_tp_size: int
    is_latent: bool
    total_heads: int
    is_staged: bool
    total_layers: int
    gpu: int | None
    model: str


class _Buffer(NamedTuple):
    """One buffer: its address, its length, the length of an item, and for a state how it is divided."""

    address: int
    nbytes: int
    item_nbytes: int
    dim: int = 0
    num_outer: int = 1
    groups: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The properties that all layers of one part share."""
        return self.nbytes, self.item_nbytes, self.dim, self.num_outer, *self.groups


def parts_of(args: Any, rank: RankSlice) -> list[CachePart]:
    """Returns the parts of a rank's cache, in the same order at both engines.

    Parameters
    ----------
    args
        SGLang's ``KVArgs``.
    rank
        The slice that the same worker holds.

    Raises
    ------
    ValueError
        Pipeline parallelism divides buffers whose layers SGLang does not name.
    kvxfer.UsageError
        The buffers' lengths do not fit each other.
    """
    buffers = _buffers(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)
    num_target = len(buffers) - getattr(args, "num_draft_entries", 0)
    first_layer = args.prefill_start_layer if rank.is_staged else 0
    maker = _Maker(args.page_size, rank, f"kv {args.kv_cache_dtype_str}", KV)
    parts = maker.tokens("kv", buffers[:num_target], first_layer)
    # SGLang does not give a draft's KV heads.
    parts += maker.shards("draft", buffers[num_target:])
    for index, kind in enumerate(args.state_types):
        parts += _state_parts(args, index, getattr(kind, "value", str(kind)), rank)
    if rank.is_staged and [part.name for part in parts] != ["kv"]:
        names = ", ".join(part.name for part in parts)
        raise ValueError(
            f"kvxfer moves the cache of a pipeline stage only if it has one kind of layers, not {names}: run "
            "prefill without pipeline parallelism (--pp-size 1)"
        )
    return parts


def _state_parts(args: Any, index: int, kind: str, rank: RankSlice) -> list[CachePart]:
    pointers = args.state_data_ptrs[index], args.state_data_lens[index], args.state_item_lens[index]
    name = f"state{index}"
    maker = _Maker(args.page_size, rank, f"{kind} {args.kv_cache_dtype_str}", index)
    if kind == _MAMBA and (dims := args.state_dim_per_tensor[index]):
        outer = args.state_slice_outer_counts[index] or [1] * len(dims)
        groups = args.state_conv_shard_groups[index] or [None] * len(dims)
        return maker.states(name, _buffers(*pointers, dims, outer, [tuple(each or ()) for each in groups]))
    buffers = _buffers(*pointers)
    if kind == _SLIDING_WINDOW and not rank.is_latent and args.swa_kv_cache_layout == "nhd":
        return maker.tokens(name, buffers, 0)
    if kind in _REPLICATED or rank.is_latent:
        return maker.whole(name, buffers)
    return maker.shards(name, buffers)


def _buffers(*columns: Sequence[Any]) -> list[_Buffer]:
    """Returns the buffers that are not empty: a layer may have no state of a kind."""
    rows = (_Buffer(*row) for row in zip(*columns, strict=True))
    return [buffer for buffer in rows if buffer.address and buffer.nbytes and buffer.item_nbytes]


class _Maker:
    """Makes parts of one component."""

    def __init__(self, page_size: int, rank: RankSlice, group: str, component: int) -> None:
        self._page_size = page_size
        self._rank = rank
        self._component = component
        self._names: Held = {"model": rank.model, "group": group}

    def tokens(self, name: str, buffers: list[_Buffer], first_layer: int) -> list[CachePart]:
        """Makes parts of token rows: keys of all layers, then values of all layers; or whole latents."""
        rank = self._rank
        layers: Held = (
            {"first_layer": first_layer, "total_layers": rank.total_layers} if rank.is_staged else {}
        )
        if rank.is_latent:
            return self.whole(name, buffers, layers)
        first_head, num_heads = heads_of(rank.total_heads, rank.tp_size, rank.tp_rank)
        if len(buffers) % 2 or any(each.item_nbytes % (self._page_size * num_heads) for each in buffers):
            return self.shards(name, buffers)
        # If values differ in length from keys, they are a part of their own.
        is_one = len({each.shape for each in buffers}) <= 1
        half = len(buffers) // 2
        held: Held = {
            **layers,
            "first_head": first_head,
            "total_heads": rank.total_heads,
            **self._names,
        }
        halves = (
            [(name, buffers)] if is_one else [(f"{name}.k", buffers[:half]), (f"{name}.v", buffers[half:])]
        )
        parts = []
        for half_name, half_buffers in halves:
            for run_name, run in _runs(half_name, half_buffers):
                layout = engine_layouts.sglang(
                    *_columns(run),
                    page_size=self._page_size,
                    num_heads=num_heads,
                    head_dim=run[0].item_nbytes // (self._page_size * num_heads),
                    dtype="uint8",
                    latent=not is_one,
                    **held,
                )
                parts.append(self._part(run_name, run, layout))
        return parts

    def whole(self, name: str, buffers: list[_Buffer], layers: Held | None = None) -> list[CachePart]:
        """Makes parts of items that every rank holds whole."""
        held: Held = {**(layers or {}), **self._names}
        return [
            self._part(run_name, run, engine_layouts.opaque_rows(*_columns(run), **held))
            for run_name, run in _runs(name, buffers)
        ]

    def shards(self, name: str, buffers: list[_Buffer]) -> list[CachePart]:
        """Makes parts of items that move only to the rank with the same shard."""
        if self._rank.is_latent:
            return self.whole(name, buffers)
        held: Held = {"first_head": self._rank.tp_rank, "total_heads": self._rank.tp_size, **self._names}
        return [
            self._part(run_name, run, engine_layouts.opaque_rows(*_columns(run), **held))
            for run_name, run in _runs(name, buffers)
        ]

    def states(self, name: str, buffers: list[_Buffer]) -> list[CachePart]:
        """Makes parts of states that are divided by channels: ``[rows, channels, bytes of a channel]``."""
        parts = []
        for run_name, run in _runs(name, buffers):
            if run[0].dim == 0:
                parts += self.whole(run_name, run)
                continue
            first = 0
            for part_name, num_channels in _projections(run_name, run[0], self._rank.state_tp_size):
                parts.append(self._channels(part_name, run, first, num_channels))
                first += num_channels
        return parts

    def _channels(self, name: str, run: list[_Buffer], first: int, num: int) -> CachePart:
        """Makes a part of some channels of a state: channels are heads, the rows before them are tokens."""
        buffer = run[0]
        channel_nbytes = buffer.item_nbytes // (buffer.num_outer * buffer.dim)
        shape = buffer.nbytes // buffer.item_nbytes, buffer.num_outer, num, channel_nbytes
        strides = buffer.item_nbytes, buffer.dim * channel_nbytes, channel_nbytes, 1
        memory = [
            memory_at(each.address + first * channel_nbytes, shape, strides, self._rank.gpu) for each in run
        ]
        held: Held = {
            "first_head": self._rank.state_tp_rank * num,
            "total_heads": self._rank.state_tp_size * num,
            **self._names,
        }
        layout = kvxfer.KVLayout.from_tensors(memory, "bthd", **held)
        return CachePart(name, self._component, memory, layout)

    def _part(self, name: str, run: list[_Buffer], layout: kvxfer.KVLayout) -> CachePart:
        memory = [memory_at(each.address, (each.nbytes,), (1,), self._rank.gpu) for each in run]
        return CachePart(name, self._component, memory, layout)


def _runs(name: str, buffers: list[_Buffer]) -> Iterator[tuple[str, list[_Buffer]]]:
    """Yields runs of consecutive buffers of equal shape, with a name for each run."""
    runs = [list(run) for _, run in groupby(buffers, key=lambda each: each.shape)]
    for index, run in enumerate(runs):
        yield name if len(runs) == 1 else f"{name}.{index}", run


def _columns(run: list[_Buffer]) -> tuple[list[int], list[int], list[int]]:
    return [each.address for each in run], [each.nbytes for each in run], [each.item_nbytes for each in run]


def _projections(name: str, buffer: _Buffer, tp_size: int) -> list[tuple[str, int]]:
    """Returns the projections of a state: each one's name, and its number of channels at this rank."""
    if sum(buffer.groups) != buffer.dim * tp_size or any(size % tp_size for size in buffer.groups):
        return [(name, buffer.dim)]
    return [
        (f"{name}.{'qkv'[at] if len(buffer.groups) == 3 else at}", size // tp_size)
        for at, size in enumerate(buffer.groups)
    ]
