"""route: which source serves which layers and heads of which destination, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.errors import UsageError
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.plan.sharding import Share, route


def rank(
    heads: range = range(8),
    layers: range = range(4),
    *,
    total_heads: int = 8,
    total_layers: int = 4,
    **fields: Any,
) -> KVLayout:
    """A rank's [l, 2, b, t, h, d] cache of 10 blocks, 16 tokens, 64 numbers of float16 a head."""
    num = len(heads)
    token = num * 128
    values: dict[str, Any] = {
        "dtype": "float16",
        "itemsize": 2,
        "num_blocks": 10,
        "block_tokens": 16,
        "num_kv": 2,
        "head_dim": 64,
        "first_layer": layers.start,
        "num_layers": len(layers),
        "total_layers": total_layers,
        "first_head": heads.start,
        "num_heads": num,
        "total_heads": total_heads,
        "block_stride": 16 * token,
        "token_stride": token,
        "head_stride": 128,
        "dim_stride": 2,
        "layer_stride": 2 * 160 * token,
        "kv_stride": 160 * token,
    }
    return KVLayout(**(values | fields))


def tensor_parallel(size: int, **fields: Any) -> list[KVLayout]:
    """8 heads over `size` ranks; each head is replicated where there are more ranks than heads."""
    each = max(8 // size, 1)
    return [rank(range(i * 8 // size, i * 8 // size + each), **fields) for i in range(size)]


def brief(shares: tuple[Share, ...]) -> list[tuple[int, int, tuple[int, int], tuple[int, int]]]:
    return [(s.src, s.dst, (s.layers[0], s.layers[-1]), (s.heads[0], s.heads[-1])) for s in shares]


# One head of one layer in a block: K and V × 16 tokens × 64 numbers × 2 bytes.
ROW_NBYTES = 2 * 16 * 64 * 2


def test_equal_ranks_serve_each_other() -> None:
    shares = route(tensor_parallel(2), tensor_parallel(2))
    assert brief(shares) == [(0, 0, (0, 3), (0, 3)), (1, 1, (0, 3), (4, 7))]
    assert [share.nbytes for share in shares] == [4 * 4 * ROW_NBYTES] * 2


def test_fewer_destinations_read_from_several_sources() -> None:
    assert brief(route(tensor_parallel(4), tensor_parallel(2))) == [
        (0, 0, (0, 3), (0, 1)),
        (1, 0, (0, 3), (2, 3)),
        (2, 1, (0, 3), (4, 5)),
        (3, 1, (0, 3), (6, 7)),
    ]


def test_more_destinations_read_slices_of_a_source() -> None:
    assert brief(route(tensor_parallel(2), tensor_parallel(4))) == [
        (0, 0, (0, 3), (0, 1)),
        (0, 1, (0, 3), (2, 3)),
        (1, 2, (0, 3), (4, 5)),
        (1, 3, (0, 3), (6, 7)),
    ]


def test_stages_and_slices_are_cut_at_both_ends() -> None:
    srcs = [rank(range(4), range(3)), rank(range(4, 8), range(3)), rank(range(8), range(3, 4))]
    dsts = [rank(range(2, 6), range(1, 4))]
    assert brief(route(srcs, dsts)) == [
        (0, 0, (1, 2), (2, 3)),
        (1, 0, (1, 2), (4, 5)),
        (2, 0, (3, 3), (2, 5)),
    ]


def test_replicated_heads_are_read_once_each_from_the_least_loaded() -> None:
    # 16 ranks for 8 heads: sources 2 i and 2 i + 1 hold head i.
    shares = route(tensor_parallel(16), tensor_parallel(8))
    assert brief(shares) == [(2 * i, i, (0, 3), (i, i)) for i in range(8)]
    # Twice as many destinations: each of a pair of sources serves one of a pair of destinations.
    shares = route(tensor_parallel(16), tensor_parallel(16))
    assert brief(shares) == [(i, i, (0, 3), (i // 2, i // 2)) for i in range(16)]


def test_a_replicated_latent_is_spread_over_its_holders() -> None:
    srcs = [rank(range(1), total_heads=1)] * 4
    dsts = [rank(range(1), total_heads=1)] * 2
    assert brief(route(srcs, dsts)) == [(0, 0, (0, 3), (0, 0)), (1, 1, (0, 3), (0, 0))]


def test_load_moves_replicated_work_elsewhere() -> None:
    srcs = [rank(range(1), total_heads=1)] * 3
    dsts = [rank(range(1), total_heads=1)] * 3
    share = 4 * ROW_NBYTES
    assert [s.src for s in route(srcs, dsts, load=[2 * share, 0, share])] == [1, 1, 2]
    assert [s.src for s in route(srcs, dsts, load=[9 * share, 9 * share, 0])] == [2, 2, 2]


def test_the_same_layouts_give_the_same_route() -> None:
    srcs, dsts = tensor_parallel(16), tensor_parallel(4)
    assert route(srcs, dsts) == route(list(srcs), tuple(dsts))


def test_no_destinations_need_nothing() -> None:
    assert route(tensor_parallel(2), []) == ()


# ---- context parallelism --------------------------------------------------------------------------


def parallel(index: int, size: int, interleave: int = 16, heads: range = range(8)) -> KVLayout:
    return rank(heads, cp_rank=index, cp_size=size, cp_interleave=interleave)


def test_every_rank_of_context_parallelism_serves_its_tokens() -> None:
    assert brief(route([parallel(0, 2), parallel(1, 2)], [rank()])) == [
        (0, 0, (0, 3), (0, 7)),
        (1, 0, (0, 3), (0, 7)),
    ]


def test_equal_divisions_of_tokens_serve_rank_by_rank() -> None:
    ends = [parallel(0, 3), parallel(1, 3), parallel(2, 3)]
    assert [(s.src, s.dst) for s in route(ends, ends)] == [(0, 0), (1, 1), (2, 2)]


def test_finer_divisions_meet_where_their_tokens_do() -> None:
    # In turns of 16: ranks 0 and 2 of 4 hold what rank 0 of 2 holds.
    four, two = [parallel(i, 4) for i in range(4)], [parallel(i, 2) for i in range(2)]
    assert [(s.src, s.dst) for s in route(four, two)] == [(0, 0), (2, 0), (1, 1), (3, 1)]
    # Turns of 16 and of 32: tokens 0 to 31 are of both ranks of the first.
    coarse = [parallel(i, 2, 32) for i in range(2)]
    assert [(s.src, s.dst) for s in route(two, coarse)] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_a_missing_rank_of_context_parallelism_is_a_gap() -> None:
    with pytest.raises(UsageError, match="rank 1 of 2") as caught:
        route([parallel(0, 2)], [rank()])
    assert caught.value.code == "layout-mismatch"


def test_sources_that_divide_tokens_differently_are_refused() -> None:
    with pytest.raises(UsageError, match=r"tokens: source 0 is one of 2 .* source 1 is one of 4"):
        route([parallel(0, 2), parallel(1, 4)], [rank()])


# ---- refusals -------------------------------------------------------------------------------------


def refused(srcs: list[KVLayout], dsts: list[KVLayout], *words: str) -> None:
    with pytest.raises(UsageError) as caught:
        route(srcs, dsts)
    assert caught.value.code == "layout-mismatch"
    for word in words:
        assert word in str(caught.value)


def test_layers_that_no_source_holds_are_named() -> None:
    srcs = [rank(layers=range(1)), rank(layers=range(3, 4))]
    refused(srcs, [rank()], "layers: no source holds 1 to 2 of destination 0", "0 to 3")


def test_heads_that_no_source_holds_are_named() -> None:
    refused(tensor_parallel(4)[:3], [rank()], "heads: no source holds 6 to 7 of destination 0", "0 to 7")
    srcs = [*tensor_parallel(2, layers=range(2)), rank(range(4), range(2, 4))]
    refused(srcs, [rank()], "heads: no source holds 4 to 7 of destination 0 in layer 2")


def test_slices_that_overlap_without_being_equal_are_named() -> None:
    refused([rank(range(5)), rank(range(3, 8))], [rank()], "heads overlap", "source 0", "0 to 4", "3 to 7")
    refused([rank(layers=range(3)), rank(layers=range(2, 4))], [rank()], "layers overlap", "0 to 2", "2 to 3")


def test_ranks_of_other_models_are_named() -> None:
    refused([rank()], [rank(total_heads=16)], "heads of the model: 8 at source 0, 16 at destination 0")
    refused([rank()], [rank(total_layers=5)], "layers of the model: 4 at source 0, 5 at destination 0")


def test_caches_that_cannot_be_bridged_are_named() -> None:
    refused([rank()], [rank(dtype="opaque")], "source 0 cannot serve destination 0", "dtype", "opaque")


@pytest.mark.parametrize("load", [[1.0], [1.0, float("nan")], [1.0, -1.0]])
def test_a_load_that_does_not_fit_is_refused(load: list[float]) -> None:
    with pytest.raises(UsageError, match="2 sources") as caught:
        route(tensor_parallel(2), tensor_parallel(2), load=load)
    assert caught.value.code == "invalid-argument"


def test_no_sources_are_refused() -> None:
    with pytest.raises(UsageError, match="no source ranks"):
        route([], [rank()])
