"""Pairs of layouts of one model, their block tables and token ranges, small enough for a millisecond.

Layouts are made of their fields, not by a constructor of `KVLayout`: strides are laid out here, from
the innermost axis outwards. Everything is drawn in few steps, and shrinks to one layer, one head,
one token, no padding and ascending blocks.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from kvxfer.layout.kv_layout import KVLayout
from tests.property.oracle import (
    common_heads,
    common_layers,
    describe_layout,
    moves,
    num_local_tokens,
)

# Of all tests of this folder together; the nightly run sets a million.
NUM_EXAMPLES = int(os.environ.get("KVXFER_PROPERTY_EXAMPLES", "6000"))
# hypothesis keeps what it has tried: more in one run take gigabytes.
MAX_RUN_EXAMPLES = 10_000


def parts(share: float) -> list[int]:
    """Returns the examples of each run of a test that gets `share` of all of them."""
    wanted = max(1, round(NUM_EXAMPLES * share))
    whole, rest = divmod(wanted, MAX_RUN_EXAMPLES)
    return [MAX_RUN_EXAMPLES] * whole + ([rest] if rest else [])


def examples(count: int) -> settings:
    """Returns settings for `count` examples: any time may pass, what fails is printed to be repeated."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=False,
        print_blob=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


# ---- drawing ------------------------------------------------------------------------------------

# What draws: `st.DrawFn`, or the `draw` of `st.data()`.
Draw = Callable[[SearchStrategy[Any]], Any]
BOOLEANS = st.booleans()


# A strategy is checked and labelled when it is first used, which takes longer than a draw.
@cache
def upto(most: int) -> SearchStrategy[int]:
    """Returns integers from 0 to `most`."""
    return st.integers(0, most)


@cache
def choice(*items: Any) -> SearchStrategy[Any]:
    """Returns one of `items`; shrinks to the first."""
    return st.sampled_from(items)


T = TypeVar("T")


def pick(draw: Draw, items: Sequence[T]) -> T:
    """Draws one of `items` by its place; shrinks to the first."""
    return items[draw(upto(len(items) - 1))]


# ---- models and ranks ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """What all ranks of both ends agree on."""

    layers: int
    kv: int
    heads: int
    dim: int
    dtype: str
    itemsize: int


@dataclass(frozen=True)
class Rank:
    """The slice of the model, and of the tokens, that one rank holds."""

    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    cp_rank: int = 0
    cp_size: int = 1
    cp_interleave: int = 1


_DTYPES = [
    ("bfloat16", 2),
    ("uint8", 1),
    ("float32", 4),
    ("float8_e4m3fn", 1),
    ("opaque", 3),
    ("complex64", 8),
]


def draw_model(draw: Draw) -> Model:
    """Draws grouped heads, a latent (MLA), or opaque rows."""
    kind = draw(choice("heads", "heads", "heads", "heads", "heads", "heads", "latent", "rows"))
    layers = 1 + draw(upto(3))
    if kind == "rows":
        return Model(layers, 1, 1, 1 + draw(upto(23)), "opaque", 1)
    dtype, itemsize = draw(choice(*_DTYPES))
    dim = 1 + draw(upto(7))
    if kind == "latent":
        return Model(layers, 1, 1, dim, dtype, itemsize)
    return Model(layers, 2, draw(choice(1, 2, 4, 8, 4, 8, 4, 3, 6)), dim, dtype, itemsize)


def tensor_parallel(model: Model, size: int) -> list[range] | None:
    """Returns each rank's heads; None when `size` neither divides their number nor is a multiple."""
    if model.heads % size == 0:
        each = model.heads // size
        return [range(rank * each, (rank + 1) * each) for rank in range(size)]
    if size % model.heads == 0:
        return [range(rank * model.heads // size, rank * model.heads // size + 1) for rank in range(size)]
    return None


def draw_world(
    draw: Draw, model: Model, *, max_tp: int = 8, max_pp: int = 3, context: bool = True
) -> list[Rank]:
    """Draws TP × PP (× CP): all ranks of one end."""
    sizes = [size for size in (1, 2, 4, 8) if size <= max_tp and tensor_parallel(model, size)]
    heads = tensor_parallel(model, draw(choice(*sizes)))
    assert heads
    stages = 1 + draw(upto(min(max_pp, model.layers) - 1))
    cuts = sorted(random.Random(draw(upto(15))).sample(range(1, model.layers), stages - 1))
    bounds = [0, *cuts, model.layers]
    cp_size = draw(choice(1, 1, 1, 1, 1, 2, 3)) if context else 1
    interleave = draw(choice(1, 2, 4, 3)) if cp_size > 1 else 1
    return [
        Rank(start, stop - start, columns.start, len(columns), cp_rank, cp_size, interleave)
        for start, stop in itertools.pairwise(bounds)
        for columns in heads
        for cp_rank in range(cp_size)
    ]


# ---- layouts ------------------------------------------------------------------------------------

# Axes from the outermost inwards: l layer, 2 keys and values, b block, t token, h head, d dim; c is
# keys then values of one head, "2d". An axis before the bar tells tensors apart.
FAMILIES = {
    "LBHNC": "lbhtc",
    "LBNHC": "lbthc",
    "LHBNC": "lhbtc",
    "BLHNC": "blhtc",
    "BLNHC": "blthc",
    "BHLNC": "bhltc",
    "[2, B, N, H, D] a layer": "l|2bthd",
    "[2, B, H, N, D] a layer": "l|2bhtd",
    "[B, 2, N, H, D] a layer": "l|b2thd",
    "[B, 2, H, N, D] in one": "lb2htd",
    "one for all": "l2bthd",
    "keys and values apart": "2|lbthd",
    "keys and values of each layer": "l2|bthd",
    "HND, one a layer": "l|bhtc",
    "any": "",
}


@dataclass(frozen=True)
class Family:
    """How the ranks of one end lay out their memory."""

    axes: str
    padding: tuple[tuple[str, int], ...]  # elements left free after an axis
    gap: int  # elements before and between tensors
    shuffled: int  # order of the tensors in memory; 0: as they are counted
    zero_strides: bool  # of axes of one element


PLAIN = Family("lbthc", (), 0, 0, True)


def draw_family(draw: Draw) -> Family:
    """Draws one of FAMILIES, some with padding and gaps."""
    axes = FAMILIES[draw(choice(*FAMILIES))]
    if not axes:
        letters = list("l2bthd")
        random.Random(draw(upto(255))).shuffle(letters)
        axes = draw(choice("", "", "l|", "2|", "l2|"))
        axes += "".join(letter for letter in letters if letter not in axes)
    padded = draw(upto(3))
    padding = tuple((draw(choice(*"btdh2l")), draw(choice(1, 2, 5))) for _ in range(padded - 1))
    return Family(
        axes,
        padding,
        draw(choice(0, 0, 3)),
        draw(choice(0, 0, 1, 2)),
        draw(BOOLEANS),
    )


def make_layout(
    model: Model, rank: Rank, family: Family, *, num_blocks: int, block_tokens: int, null_block: int = -1
) -> KVLayout:
    """Lays the axes of one rank out in memory, innermost first."""
    outer, _, inner = family.axes.rpartition("|")
    if model.kv == 1:
        outer = outer.replace("2", "")
    inner = inner.replace("c", "2d")
    counts = {
        "l": rank.num_layers,
        "2": model.kv,
        "b": num_blocks,
        "t": block_tokens,
        "h": rank.num_heads,
        "d": model.dim,
    }
    padding = dict(family.padding)
    strides = {}
    size = model.itemsize
    for letter in reversed(inner):
        strides[letter] = size
        size = size * counts[letter] + padding.get(letter, 0) * model.itemsize
    if family.zero_strides:
        strides = {letter: stride if counts[letter] > 1 else 0 for letter, stride in strides.items()}
    num_tensors = 1
    for letter in outer:
        num_tensors *= counts[letter]
    order = list(range(num_tensors))
    if family.shuffled:
        random.Random(family.shuffled).shuffle(order)
    start = {tensor: place * (size + family.gap * model.itemsize) for place, tensor in enumerate(order)}
    table = []
    for layer in range(rank.num_layers):
        for kv in range(model.kv):
            tensor, within = 0, family.gap * model.itemsize
            for letter, index in (("l", layer), ("2", kv)):
                if letter in outer:
                    tensor = tensor * counts[letter] + index
                else:
                    within += index * strides.get(letter, 0)
            table.append(start[tensor] + within)
    layer_stride = table[model.kv] - table[0] if rank.num_layers > 1 else 0
    kv_stride = table[1] - table[0] if model.kv > 1 else 0
    regular = [
        table[0] + layer * layer_stride + kv * kv_stride
        for layer in range(rank.num_layers)
        for kv in range(model.kv)
    ]
    # Regular layers are described by strides, except for shuffled tensors, whose lists may be regular too.
    listed = regular != table or layer_stride < 0 or kv_stride < 0 or family.shuffled > 0
    return KVLayout(
        dtype=model.dtype,
        itemsize=model.itemsize,
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        num_kv=model.kv,
        head_dim=model.dim,
        first_layer=rank.first_layer,
        num_layers=rank.num_layers,
        total_layers=model.layers,
        first_head=rank.first_head,
        num_heads=rank.num_heads,
        total_heads=model.heads,
        block_stride=strides["b"],
        token_stride=strides["t"],
        head_stride=strides["h"],
        dim_stride=strides["d"],
        offset=0 if listed else table[0],
        layer_stride=0 if listed else layer_stride,
        kv_stride=0 if listed else kv_stride,
        offsets=tuple(table) if listed else (),
        null_block=null_block,
        cp_rank=rank.cp_rank,
        cp_size=rank.cp_size,
        cp_interleave=rank.cp_interleave,
    )


# ---- tables -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tables:
    """The block tables of one sequence at both ends, and what of it to move."""

    src: list[int]
    dst: list[int]
    src_num_blocks: int
    dst_num_blocks: int
    tokens: range | None


def pages(layout: KVLayout, num_tokens: int) -> int:
    """Returns the blocks that a rank needs for a sequence."""
    return -(-num_local_tokens(layout, num_tokens) // layout.block_tokens)


def number(num: int, null_block: int, seed: int, spare: int) -> tuple[list[int], int]:
    """Returns `num` distinct real block ids, ascending for seed 0, and the blocks of such a cache."""
    total = num + spare + (1 if null_block >= 0 else 0)
    ids = [block for block in range(max(total, null_block + 1)) if block != null_block]
    if seed:
        random.Random(seed).shuffle(ids)
    return ids[:num], max(total, null_block + 1, 1)


def draw_tables(draw: Draw, src: KVLayout, dst: KVLayout, *, max_tokens: int, ranges: bool = True) -> Tables:
    """Draws tables that both name a sequence's tokens: fragmented, repeated at the source, with null blocks.

    Only pages, ranks and null blocks of the layouts are looked at; how many blocks they must have is
    in the answer.
    """
    num_tokens = 0 if draw(upto(15)) == 15 else 1 + draw(upto(max_tokens - 1))
    tokens = None
    if ranges and draw(BOOLEANS):
        start = draw(upto(max(num_tokens - 1, 0)))
        tokens = range(start, num_tokens - draw(upto(num_tokens - start)))
    num_src, num_dst = pages(src, num_tokens), pages(dst, num_tokens)
    if tokens is not None:  # what lies behind the range may be there at one end only
        num_src += draw(choice(0, 0, 1))
        num_dst += draw(choice(0, 0, 1))
    seed = draw(upto(63))
    src_ids, src_num_blocks = number(num_src, src.null_block, seed, seed % 3)
    dst_ids, dst_num_blocks = number(num_dst, dst.null_block, seed // 2, seed % 2)
    if num_src > 1 and draw(upto(3)) == 3:
        # A prefix that two halves of the table share, or one block over and over.
        shared = 1 + draw(upto(num_src - 2))
        src_ids[shared : 2 * shared] = src_ids[: len(src_ids[shared : 2 * shared])]
    if dst.null_block >= 0 and num_dst:
        # A sliding window has lost its first pages; any others may be null, too.
        gone = draw(upto(num_dst))
        nulls = 2**gone - 1 if draw(BOOLEANS) else draw(upto(2**num_dst - 1))
        dst_ids = [dst.null_block if nulls >> i & 1 else block for i, block in enumerate(dst_ids)]
    if src.null_block >= 0 and num_src and draw(BOOLEANS):
        # A source page may be null where nothing of it is moved.
        needed = _pages_read(src, dst, src_ids, dst_ids, tokens)
        src_ids = [block if i in needed else src.null_block for i, block in enumerate(src_ids)]
    return Tables(src_ids, dst_ids, src_num_blocks, dst_num_blocks, tokens)


def _pages_read(
    src: KVLayout, dst: KVLayout, src_ids: Sequence[int], dst_ids: Sequence[int], tokens: range | None
) -> set[int]:
    numbered = list(range(len(src_ids)))
    return set(moves(replace(src, null_block=-1), dst, numbered, dst_ids, tokens).src_blocks)


# ---- examples -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """One transfer between two ranks; its repr is what a failure prints."""

    src: KVLayout
    dst: KVLayout
    src_table: list[int]
    dst_table: list[int]
    tokens: range | None
    heads: range | None

    def __repr__(self) -> str:
        return (
            f"\n  {describe_layout('src', self.src)}\n  {describe_layout('dst', self.dst)}\n"
            f"  src table {self.src_table}, dst table {self.dst_table}, "
            f"tokens {self.tokens}, heads {self.heads}"
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # hypothesis prints every field of a dataclass otherwise.
        printer.text(repr(self))


_PAGES = [(4, 4), (1, 1), (2, 2), (2, 8), (8, 2), (1, 4), (6, 4), (4, 6), (3, 2), (5, 7), (8, 8), (3, 1)]


def draw_pages(draw: Draw, model: Model) -> tuple[int, int]:
    """Draws tokens of a block at both ends: equal, one a multiple of the other, or neither."""
    if model.dtype == "opaque" and model.itemsize == 1:
        return 1, 1
    drawn: tuple[int, int] = draw(choice(*_PAGES))
    return drawn


def overlapping(ranks: Sequence[Rank], other: Rank) -> list[Rank]:
    """Returns those that have a layer and a head in common with `other`."""

    def touch(first: int, num: int, at: int, count: int) -> bool:
        return first < at + count and at < first + num

    return [
        rank
        for rank in ranks
        if touch(rank.first_layer, rank.num_layers, other.first_layer, other.num_layers)
        and touch(rank.first_head, rank.num_heads, other.first_head, other.num_heads)
    ]


@st.composite
def transfers(draw: st.DrawFn, *, max_tokens: int = 20, ranges: bool = True) -> Example:
    """Draws two ranks that have something in common, and a sequence that lies on both."""
    model = draw_model(draw)
    context = model.dtype != "opaque"
    dst_rank = pick(draw, draw_world(draw, model, context=context))
    src_rank = pick(draw, overlapping(draw_world(draw, model, context=context), dst_rank))
    src_tokens, dst_tokens = draw_pages(draw, model)
    src_family, dst_family = draw_family(draw), draw_family(draw)
    # How many blocks a cache has is known when its table is drawn; 3 are enough for any null block.
    src, dst = (
        make_layout(model, rank, PLAIN, num_blocks=3, block_tokens=block_tokens, null_block=draw(nulls))
        for rank, block_tokens, nulls in (
            (src_rank, src_tokens, choice(-1, -1, -1, 0, 2)),
            (dst_rank, dst_tokens, choice(-1, -1, -1, 0, 1)),
        )
    )
    both = draw_tables(draw, src, dst, max_tokens=max_tokens, ranges=ranges)
    src, dst = (
        make_layout(
            model,
            rank,
            family,
            num_blocks=num_blocks,
            block_tokens=sketch.block_tokens,
            null_block=sketch.null_block,
        )
        for rank, family, num_blocks, sketch in (
            (src_rank, src_family, both.src_num_blocks, src),
            (dst_rank, dst_family, both.dst_num_blocks, dst),
        )
    )
    heads = None
    shared = common_heads(src, dst)
    if len(shared) > 1 and draw(upto(3)) == 3:
        start = draw(upto(len(shared) - 1))
        heads = range(shared[start], shared[start] + 1 + draw(upto(shared[-1] - shared[start])))
    assert common_layers(src, dst)
    return Example(src, dst, both.src, both.dst, both.tokens, heads)
