"""route: which rank reads what from which, against a count of every (layer, head, token) of every rank."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from kvxfer.errors import UsageError
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.plan.sharding import route
from tests.property.oracle import describe_layout, local_token
from tests.property.strategies import (
    NUM_EXAMPLES,
    PLAIN,
    Draw,
    Model,
    Rank,
    choice,
    draw_world,
    examples,
    make_layout,
    parts,
    upto,
)

pytestmark = pytest.mark.timeout(0 if NUM_EXAMPLES > 100_000 else 300)


def layouts(model: Model, ranks: list[Rank]) -> list[KVLayout]:
    return [make_layout(model, rank, PLAIN, num_blocks=2, block_tokens=4) for rank in ranks]


def draw_heads(draw: Draw) -> Model:
    return Model(1 + draw(upto(5)), 2, draw(choice(1, 2, 4, 8, 3, 6)), 2, "bfloat16", 2)


def draw_slice(draw: Draw, model: Model) -> Rank:
    """Draws any slice of layers and heads, as no engine would cut them."""
    first_layer, first_head = draw(upto(model.layers - 1)), draw(upto(model.heads - 1))
    return Rank(
        first_layer,
        1 + draw(upto(model.layers - first_layer - 1)),
        first_head,
        1 + draw(upto(model.heads - first_head - 1)),
    )


def draw_grid(draw: Draw, model: Model) -> list[Rank]:
    """Draws ranks that cut layers and heads anywhere, each slice held once or more."""

    def bounds(total: int) -> list[int]:
        chosen = draw(upto(2 ** (total - 1) - 1))
        return [0, *(at for at in range(1, total) if chosen >> at - 1 & 1), total]

    columns = bounds(model.heads)
    return [
        Rank(layer, layer_stop - layer, head, head_stop - head)
        for layer, layer_stop in itertools.pairwise(bounds(model.layers))
        for head, head_stop in itertools.pairwise(columns)
        for _ in range(draw(choice(1, 1, 2)))
    ]


def cells(layout: KVLayout) -> set[tuple[int, int]]:
    return {
        (layer, head)
        for layer in range(layout.first_layer, layout.first_layer + layout.num_layers)
        for head in range(layout.first_head, layout.first_head + layout.num_heads)
    }


@pytest.mark.parametrize("count", parts(0.08), ids=str)
def test_every_layer_and_head_comes_from_one_holder_or_the_gap_is_named(count: int) -> None:
    @examples(count)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        model = draw_heads(data.draw)
        if data.draw(st.booleans()):
            src_ranks = draw_world(data.draw, model, context=False)
            dst_ranks = draw_world(data.draw, model, context=False)
            # More replicas (data parallel), or a rank that is not there.
            if data.draw(st.booleans()):
                src_ranks += src_ranks[: data.draw(st.integers(0, len(src_ranks)))]
            if len(src_ranks) > 1 and data.draw(st.integers(0, 3)) == 3:
                del src_ranks[data.draw(st.integers(0, len(src_ranks) - 1))]
        else:
            src_ranks = draw_grid(data.draw, model)
            if data.draw(upto(3)) == 3:
                src_ranks.append(draw_slice(data.draw, model))
            dst_ranks = [draw_slice(data.draw, model) for _ in range(1 + data.draw(upto(3)))]
        srcs, dsts = layouts(model, src_ranks), layouts(model, dst_ranks)
        load = data.draw(
            st.none() | st.lists(st.sampled_from([0.0, 1.0, 1e9]), min_size=len(srcs), max_size=len(srcs))
        )
        for name, side in (("src", srcs), ("dst", dsts)):
            for i, layout in enumerate(side):
                note(describe_layout(f"{name} {i}", layout))
        there = set().union(*map(cells, srcs))
        if any(cells(x) != cells(y) and cells(x) & cells(y) for x, y in itertools.combinations(srcs, 2)):
            # Whose of the two is read would be anyone's guess: a slice is held whole, or not at all.
            with pytest.raises(UsageError, match=r"(layers|heads).* \d+"):
                route(srcs, dsts, load)
            return
        if gaps := sorted(set().union(*map(cells, dsts)) - there):
            with pytest.raises(UsageError, match=r"layer|head") as caught:
                route(srcs, dsts, load)
            words = str(caught.value)
            assert any(str(x) in words for gap in gaps for x in gap), f"{words}: gaps are {gaps}"
            return
        shares = route(srcs, dsts, load)
        assert shares == route(tuple(srcs), tuple(dsts), load)
        written: Counter[tuple[int, int, int]] = Counter()
        for share in shares:
            area = {(layer, head) for layer in share.layers for head in share.heads}
            assert area, f"{share} is empty"
            assert area <= cells(srcs[share.src]), f"{share}: the source has it not"
            assert area <= cells(dsts[share.dst]), f"{share}: the destination has it not"
            written.update((share.dst, *cell) for cell in area)
        wanted = Counter((d, *cell) for d, dst in enumerate(dsts) for cell in cells(dst))
        assert written == wanted, f"{written - wanted} twice, {wanted - written} never"

    check()


@pytest.mark.parametrize("count", parts(0.03), ids=str)
def test_equal_replicas_share_the_load_and_a_busy_one_is_spared(count: int) -> None:
    @examples(count)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        model = draw_heads(data.draw)
        whole = Rank(0, model.layers, 0, model.heads)
        num_srcs = data.draw(st.integers(1, 6))
        dst_ranks = draw_world(data.draw, model, context=False, max_pp=1)
        srcs, dsts = layouts(model, [whole] * num_srcs), layouts(model, dst_ranks)
        served = Counter(dict.fromkeys(range(num_srcs), 0))
        for share in route(srcs, dsts):
            served[share.src] += len(share.layers) * len(share.heads)
        # A least loaded holder is never ahead of another by more than the largest thing it took.
        largest = max(rank.num_layers * rank.num_heads for rank in dst_ranks)
        assert max(served.values()) - min(served.values()) <= largest, served
        if num_srcs > 1:
            busy = data.draw(st.integers(0, num_srcs - 1))
            load = [1e18 if src == busy else 0.0 for src in range(num_srcs)]
            assert all(share.src != busy for share in route(srcs, dsts, load))

    check()


@pytest.mark.parametrize("count", parts(0.02), ids=str)
def test_context_parallel_ranks_bring_every_token_once(count: int) -> None:
    @examples(count)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        model = replace(draw_heads(data.draw), layers=2)
        srcs, dsts = (layouts(model, draw_world(data.draw, model, max_tp=4, max_pp=2)) for _ in range(2))
        for name, side in (("src", srcs), ("dst", dsts)):
            for i, layout in enumerate(side):
                note(describe_layout(f"{name} {i}", layout))
        num_tokens = 24
        written: Counter[tuple[int, int, int, int]] = Counter()
        for share in route(srcs, dsts):
            for token in range(num_tokens):
                if None in (local_token(srcs[share.src], token), local_token(dsts[share.dst], token)):
                    continue
                for layer in share.layers:
                    written.update((share.dst, layer, head, token) for head in share.heads)
        wanted = Counter(
            (d, *cell, token)
            for d, dst in enumerate(dsts)
            for cell in cells(dst)
            for token in range(num_tokens)
            if local_token(dst, token) is not None
        )
        assert written == wanted, f"{written - wanted} twice, {wanted - written} never"

    check()
