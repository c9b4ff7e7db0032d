"""route: who serves whom among equal holders, and what is refused.

That each (layer, head, token) comes from one holder is compared with a count in tests/property/test_route.py.
"""

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


def parallel(index: int, size: int, interleave: int = 16) -> KVLayout:
    return rank(cp_rank=index, cp_size=size, cp_interleave=interleave)


# One head of one layer in a block: K and V × 16 tokens × 64 numbers × 2 bytes.
ROW_NBYTES = 2 * 16 * 64 * 2
ALL = (0, 3)  # layers
LATENT = rank(range(1), total_heads=1)


@pytest.mark.parametrize(
    ("srcs", "dsts", "shares"),
    [
        (
            [rank(range(4), range(3)), rank(range(4, 8), range(3)), rank(range(8), range(3, 4))],
            [rank(range(2, 6), range(1, 4))],
            [(0, 0, (1, 2), (2, 3)), (1, 0, (1, 2), (4, 5)), (2, 0, (3, 3), (2, 5))],
        ),
        # 16 ranks for 8 heads: sources 2 i and 2 i + 1 hold head i.
        (tensor_parallel(16), tensor_parallel(8), [(2 * i, i, ALL, (i, i)) for i in range(8)]),
        # Twice as many destinations: each of a pair of sources serves one of a pair of destinations.
        (tensor_parallel(16), tensor_parallel(16), [(i, i, ALL, (i // 2, i // 2)) for i in range(16)]),
        ([LATENT] * 4, [LATENT] * 2, [(0, 0, ALL, (0, 0)), (1, 1, ALL, (0, 0))]),
        (tensor_parallel(2), [], []),
    ],
    ids=["stages", "replicas", "pairs", "latent", "none"],
)
def test_who_serves_whom(srcs: list[KVLayout], dsts: list[KVLayout], shares: list[Any]) -> None:
    found = route(srcs, dsts)
    assert brief(found) == shares
    for share in found:
        assert share.nbytes == len(share.layers) * len(share.heads) * ROW_NBYTES


# ---- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("srcs", "dst", "words"),
    [
        ([parallel(0, 2)], rank(), "rank 1 of 2"),
        ([parallel(0, 2), parallel(1, 4)], rank(), "tokens: source 0 is one of 2 .* source 1 is one of 4"),
        (
            [rank(layers=range(1)), rank(layers=range(3, 4))],
            rank(),
            "layers: no source holds 1 to 2 of destination 0.*0 to 3",
        ),
        (tensor_parallel(4)[:3], rank(), "heads: no source holds 6 to 7 of destination 0.*0 to 7"),
        ([rank(range(5)), rank(range(3, 8))], rank(), "heads overlap.*source 0.*0 to 4.*3 to 7"),
        ([rank(layers=range(3)), rank(layers=range(2, 4))], rank(), "layers overlap.*0 to 2.*2 to 3"),
        ([rank()], rank(total_heads=16), "heads of the model: 8 at source 0, 16 at destination 0"),
        ([rank()], rank(total_layers=5), "layers of the model: 4 at source 0, 5 at destination 0"),
        ([rank()], rank(dtype="opaque"), "source 0 cannot serve destination 0.*dtype.*opaque"),
    ],
)
def test_what_cannot_be_served_is_named(srcs: list[KVLayout], dst: KVLayout, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        route(srcs, [dst])
    assert caught.value.code == "layout-mismatch"


def test_no_sources_are_refused() -> None:
    with pytest.raises(UsageError, match="no source ranks"):
        route([], [rank()])


@pytest.mark.parametrize("load", [[1.0], [1.0, float("nan")], [1.0, -1.0]])
def test_a_load_that_does_not_fit_is_refused(load: list[float]) -> None:
    with pytest.raises(UsageError, match="2 sources") as caught:
        route(tensor_parallel(2), tensor_parallel(2), load=load)
    assert caught.value.code == "invalid-argument"
