"""Caches that vLLM's CPU engine cannot have, between worker halves: all axis orders, unequal pages and TP.

Real agents and real copies; the tensors are ours, laid out as GPU engines do.
"""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.connectors.common.worker_rank import WorkerRank
from kvxfer.connectors.vllm.cache_groups import SpecGroup
from kvxfer.connectors.vllm.cache_tensors import ModelCache, memory_of
from tests.connectors.workers import (
    NUM_LAYERS,
    Array,
    Pushed,
    Worker,
    collected,
    forward,
    order_of,
    pull,
    some_tokens,
)
from tests.seeds import seed_of
from tests.vllm.workers import workers
from tests.waiting import until

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
NUM_TOKENS, NUM_BLOCKS = 150, 32
SHAPES = list(itertools.product([(32, 32), (16, 64), (64, 16), (48, 32)], [(1, 1), (1, 2), (2, 1)]))


def _pairs() -> list[object]:
    """Every pair of orders, each with other tokens of a block and another TP than its neighbours."""
    found: list[object] = []
    for (at, src), (to, dst) in itertools.product(enumerate(ORDERS), repeat=2):
        block_sizes, tp_sizes = SHAPES[(7 * at + 5 * to) % len(SHAPES)]
        name = "-".join((src, dst, "to".join(map(str, block_sizes)), f"tp{tp_sizes[0]}to{tp_sizes[1]}"))
        found.append(pytest.param(src, dst, block_sizes, tp_sizes, id=name))
    return found


def engine(
    name: str,
    tp_size: int,
    block_size: int,
    order: str,
    packed_for: str = "",
    cache_dtype: str = "auto",
    is_latent: bool = False,
    model: str = "tiny",
) -> AbstractContextManager[list[Worker]]:
    return workers(
        name,
        tp_size,
        num_blocks=NUM_BLOCKS,
        block_size=block_size,
        order=order,
        packed_for=packed_for,
        cache_dtype=cache_dtype,
        is_latent=is_latent,
        model=model,
    )


def push(pushed: Pushed, prefill: list[Worker], decode: list[Worker], whole: Array) -> None:
    """Hands it over in two steps of prefill; returns when decode has it."""
    for worker in decode:
        worker.half.step(pushed.order(prefill))
    for first, stop in ((0, 70), (70, NUM_TOKENS)):
        forward(prefill, pushed, first, stop, whole)
    received: list[set[str]] = [set() for _ in decode]

    def is_over() -> bool:
        for worker in prefill:
            worker.half.collect(set())
        for at, worker in enumerate(decode):
            result = worker.half.collect(set())
            assert not result.failed
            received[at] |= result.received
        return all(received)

    until(is_over, "the push")


@pytest.mark.parametrize("way", ["pull", "push"])
@pytest.mark.parametrize(("src_order", "dst_order", "block_sizes", "tp_sizes"), _pairs())
def test_every_token_is_brought_and_no_other(
    way: str, src_order: str, dst_order: str, block_sizes: tuple[int, int], tp_sizes: tuple[int, int]
) -> None:
    pushed = Pushed.draw("handed over", NUM_TOKENS, 1, NUM_BLOCKS, block_sizes)
    # What decode already has: whole blocks at both ends.
    pushed.first_token = 96 if max(block_sizes) < 64 else 64
    whole = some_tokens(NUM_TOKENS)
    with (
        engine("prefill", tp_sizes[0], block_sizes[0], src_order) as prefill,
        engine("decode", tp_sizes[1], block_sizes[1], dst_order) as decode,
    ):
        if way == "push":
            push(pushed, prefill, decode, whole)
        else:
            for layer in range(NUM_LAYERS):
                pushed.compute(prefill, layer, 0, NUM_TOKENS, whole)
            pull(pushed, prefill, decode)
        check(pushed, decode, whole)


def check(pushed: Pushed, decode: list[Worker], whole: Array) -> None:
    """Asserts that every token that should move has arrived, and that nothing else was written."""
    for layer in range(NUM_LAYERS):
        arrived = pushed.arrived(decode, layer)
        assert np.array_equal(arrived[pushed.first_token :], whole[layer, pushed.first_token :])
        assert not arrived[: pushed.first_token].any()
    moved = NUM_LAYERS * (pushed.num_tokens - pushed.first_token) * whole[0, 0].size
    assert sum(np.count_nonzero(cache) for worker in decode for cache in worker.caches.values()) == moved


@pytest.mark.parametrize("tp_sizes", [(1, 2), (2, 1), (2, 2)])
def test_a_latent_cache_reaches_every_rank(tp_sizes: tuple[int, int]) -> None:
    pushed = Pushed.draw("latent", NUM_TOKENS, 5, NUM_BLOCKS, (64, 16))
    whole = some_tokens(NUM_TOKENS)[:, :, :1]
    with (
        engine("prefill", tp_sizes[0], 64, "LBHNC", is_latent=True) as prefill,
        engine("decode", tp_sizes[1], 16, "BLHNC", is_latent=True) as decode,
    ):
        for layer in range(NUM_LAYERS):
            pushed.compute(prefill, layer, 0, NUM_TOKENS, whole)
        pull(pushed, prefill, decode)
        for worker in decode:
            for layer in range(NUM_LAYERS):
                assert np.array_equal(pushed.arrived([worker], layer), whole[layer])


@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_e5m2"])
def test_bytes_of_fp8_move_as_they_are(cache_dtype: str) -> None:
    """Includes NaN, infinities and zeros of both signs: nothing is converted."""
    pushed = Pushed.draw("fp8", NUM_TOKENS, 4, NUM_BLOCKS, (16, 64))
    random = np.random.default_rng(seed_of("fp8"))
    whole = random.integers(0, 256, (NUM_LAYERS, NUM_TOKENS, 4, 8), np.uint8)
    with (
        engine("prefill", 2, 16, "LBNHC", cache_dtype=cache_dtype) as prefill,
        engine("decode", 1, 64, "BHLNC", cache_dtype=cache_dtype) as decode,
    ):
        for layer in range(NUM_LAYERS):
            pushed.compute(prefill, layer, 0, NUM_TOKENS, whole)
        pull(pushed, prefill, decode)
        for layer in range(NUM_LAYERS):
            assert np.array_equal(pushed.arrived(decode, layer), whole[layer])


@pytest.mark.parametrize(
    ("prefill_has", "decode_has", "field"),
    [
        ({"packed_for": "AVX2"}, {"packed_for": "AVX512"}, "packed for AVX2"),
        ({"packed_for": "AVX2"}, {}, "packed for AVX2"),
        ({"cache_dtype": "fp8"}, {}, "float8_e4m3fn"),
        ({"model": "tiny/revision 1"}, {"model": "tiny/revision 2"}, "tiny/revision 1"),
        ({"cache_dtype": "fp8"}, {"cache_dtype": "fp8_e5m2"}, "float8_e5m2"),
    ],
)
def test_what_the_other_cannot_read_is_refused_in_words(
    prefill_has: dict[str, Any],
    decode_has: dict[str, Any],
    field: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pushed = Pushed.draw("refused", NUM_TOKENS, 3, NUM_BLOCKS)
    with (
        engine("prefill", 1, 32, "LBHNC", **prefill_has) as prefill,
        engine("decode", 1, 32, "LBHNC", **decode_has) as decode,
    ):
        decode[0].half.step(order_of(pushed, prefill))
        (result,) = collected(decode)
        assert result.failed == {pushed.name: set(pushed.dst)}
        assert not any(cache.any() for cache in decode[0].caches.values())
    assert field in caplog.text


def test_a_cache_that_is_not_in_host_memory_is_refused_in_words() -> None:
    group = SpecGroup(0, "kv.0", ("layer",), 32, spec=None)
    elsewhere = {"layer": torch.empty((NUM_BLOCKS, 4, 32, 8), device="meta")}
    with pytest.raises(NotImplementedError, match="on meta: this worker computes on cpu"):
        memory_of((group,), elsewhere, ModelCache("tiny", "auto", 4, NUM_BLOCKS), WorkerRank("engine"))
