"""Caches without a null block: tables number the first block 1, and its bytes move like all others."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np

import kvxfer
from kvxfer.connectors.common.handover import Handover
from kvxfer.connectors.common.step import FetchOrder, Grant, Step
from kvxfer.connectors.common.worker_rank import WorkerRank
from tests.connectors.workers import (
    BLOCK_SIZE,
    LAYERS,
    NUM_HEADS,
    Pushed,
    Worker,
    collected,
    memory_of,
    prefill_knows,
    some_tokens,
)
from tests.waiting import until

NUM_BLOCKS = 8
# All blocks of a cache, in another order at each end; 1 is the first block.
SRC, DST = (3, 1, 8), (1, 8, 2)
NUM_TOKENS = 3 * BLOCK_SIZE - 5


def worker_of(name: str, **settings: Any) -> Worker:
    position = WorkerRank(name)
    shape = NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, 8
    caches = {layer: np.zeros(shape, np.float32) for layer in LAYERS}
    memory = [
        replace(each, layout=replace(each.layout, null_block=-1)) for each in memory_of(caches, position)
    ]
    return Worker(position, memory, caches, **settings)


def blocks(table: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(block - 1 for block in table)


def test_a_pull_brings_the_first_block() -> None:
    with worker_of("prefill") as prefill, worker_of("decode") as decode:
        for at, layer in enumerate(LAYERS):
            prefill.caches[layer][:] = np.random.default_rng(at).random(
                (NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, 8)
            )
        lease = kvxfer.LeaseToken.draw()
        prefill.half.step(Step(grants=[Grant("a", (lease,), (SRC,))]))
        source = Handover("a", (prefill.rank,), (lease,), (SRC,), (BLOCK_SIZE,), (1,), NUM_TOKENS)
        decode.half.step(Step(fetches=[FetchOrder("b", source, (DST,), 0, NUM_TOKENS)]))
        assert not decode.until("received", "b").failed
        assert np.array_equal(decode.pages(blocks(DST)), prefill.pages(blocks(SRC)))
        # The other blocks are unchanged.
        others = tuple({*range(NUM_BLOCKS)} - {*blocks(DST)})
        assert not decode.pages(others).any()
        prefill.until("sent", "a", {"a"})


def test_blocks_that_lack_bytes_are_named_as_tables_name_them() -> None:
    with worker_of("prefill") as prefill, worker_of("decode") as decode:
        lease = kvxfer.LeaseToken.draw()  # which was granted to nobody
        source = Handover("a", (prefill.rank,), (lease,), (SRC,), (BLOCK_SIZE,), (1,), NUM_TOKENS)
        decode.half.step(Step(fetches=[FetchOrder("b", source, (DST,), 0, NUM_TOKENS)]))
        assert decode.until("received", "b").failed == {"b": set(DST)}


def test_a_push_brings_the_first_block() -> None:
    pushed = Pushed("a", SRC, DST, NUM_TOKENS, random.Random(0).randbytes(16))
    whole = some_tokens(NUM_TOKENS)
    with worker_of("prefill") as prefill, worker_of("decode") as decode:
        decode.half.step(pushed.order([prefill]))
        until(lambda: bool(decode.half.collect(set())) and prefill_knows([prefill], pushed), "registration")
        # The helpers that compute and compare count blocks from 0, as memory does.
        own = replace(pushed, src=blocks(SRC), dst=blocks(DST))
        prefill.half.before_forward(pushed.chunk(0, NUM_TOKENS))
        for layer, name in enumerate(LAYERS):
            own.compute([prefill], layer, 0, NUM_TOKENS, whole)
            prefill.half.layer_done(name)
        prefill.half.after_forward(whole=True)
        (result,) = collected([decode])
        assert not result.failed
        for layer in range(len(LAYERS)):
            assert np.array_equal(own.arrived([decode], layer), whole[layer])
        assert collected([prefill], {"a"})[0].sent == {"a"}
