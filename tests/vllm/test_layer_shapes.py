"""Layers of two shapes in one cache group, as with a draft model: only workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, UniformTypeKVCacheSpecs

from kvxfer import LeaseToken
from kvxfer.connectors.common.expected_push import ExpectedPush
from kvxfer.connectors.common.handover import Handover
from kvxfer.connectors.common.step import Chunk, FetchOrder, Grant, Step
from kvxfer.connectors.common.worker_half import StepResults
from kvxfer.connectors.common.worker_rank import WorkerRank
from kvxfer.connectors.vllm.cache_groups import SpecGroup, groups_of
from kvxfer.connectors.vllm.cache_tensors import ModelCache
from tests.connectors.workers import BOUND_S, PATIENCE
from tests.vllm.workers import TensorWorker as Worker
from tests.waiting import until

BLOCK_SIZE, NUM_BLOCKS = 32, 16
# (heads, dim of a head): the model's layers between those of its draft, whose heads are fewer and wider.
SHAPES = {"layers.0": (4, 8), "draft.layers.0": (2, 16), "layers.1": (4, 8), "draft.layers.1": (2, 16)}
NUM_TOKENS = 90
SRC, DST = (3, 9, 5), (7, 2, 11)
LEASE, KEY = LeaseToken.draw(), b"k" * 16


def groups(tp_size: int = 1) -> tuple[SpecGroup, ...]:
    specs: dict[str, KVCacheSpec] = {
        name: FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=num_heads // tp_size, head_size=dim, dtype=torch.float32
        )
        for name, (num_heads, dim) in SHAPES.items()
    }
    uniform = UniformTypeKVCacheSpecs.from_specs(specs)
    assert uniform is not None
    group = SimpleNamespace(layer_names=list(specs), kv_cache_spec=uniform)
    config: Any = SimpleNamespace(transfer_group_ids=[0], kv_cache_groups=[group])
    return groups_of(config)


@contextmanager
def engine(name: str, tp_size: int = 1) -> Iterator[list[Worker]]:
    with ExitStack() as stack:
        made = []
        for rank in range(tp_size):
            tensors = {
                layer: torch.rand(NUM_BLOCKS, num_heads // tp_size, BLOCK_SIZE, 2 * dim)
                for layer, (num_heads, dim) in SHAPES.items()
            }
            cache = ModelCache("tiny", "auto", 4, NUM_BLOCKS)
            worker = Worker(WorkerRank(name, rank, tp_size), groups(tp_size), tensors, cache, **PATIENCE)
            made.append(stack.enter_context(worker))
        yield made


def order(source: Handover | ExpectedPush) -> Step:
    return Step(fetches=[FetchOrder("a", source, (DST,), 0, NUM_TOKENS)])


def handover(prefill: list[Worker]) -> Handover:
    ranks = tuple(worker.rank for worker in prefill)
    for worker in prefill:
        worker.half.step(Step(grants=[Grant("a", (LEASE,), (SRC,))]))
    return Handover("a", ranks, (LEASE,), (SRC,), (BLOCK_SIZE,), (1,), NUM_TOKENS)


def ended(decode: list[Worker], prefill: list[Worker]) -> list[StepResults]:
    results: dict[int, StepResults] = {}

    def all_have() -> bool:
        for worker in prefill:
            worker.half.collect(set())
        for at, worker in enumerate(decode):
            if at not in results and (result := worker.half.collect(set())).received:
                results[at] = result
        return len(results) == len(decode)

    until(all_have, f"a report of every worker within {BOUND_S} s")
    return list(results.values())


def heads_of(worker: Worker, name: str, blocks: tuple[int, ...]) -> torch.Tensor:
    return worker.tensors[name][list(blocks)].transpose(0, 1)


def assert_arrived(prefill: list[Worker], decode: list[Worker]) -> None:
    for name in SHAPES:
        src = torch.cat([heads_of(worker, name, SRC) for worker in prefill])
        dst = torch.cat([heads_of(worker, name, DST) for worker in decode])
        assert torch.equal(src, dst)


def test_a_scheduler_that_knows_one_shape_and_workers_that_know_two_have_one_table() -> None:
    model, draft = groups()
    assert (model.name, model.table, model.layer_names) == ("kv.0", 0, ("layers.0", "layers.1"))
    assert (draft.name, draft.table, draft.layer_names) == ("kv.0.1", 0, ("draft.layers.0", "draft.layers.1"))
    assert model.lease(LEASE) == LEASE != draft.lease(LEASE)
    with engine("prefill") as (worker,):
        assert worker.half.rank.pages_per_block == (1,)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 1)])
def test_layers_of_both_shapes_are_pulled(sizes: tuple[int, int]) -> None:
    with engine("prefill", sizes[0]) as prefill, engine("decode", sizes[1]) as decode:
        source = handover(prefill)
        for worker in decode:
            worker.half.step(order(source))
        assert not any(result.failed for result in ended(decode, prefill))
        assert_arrived(prefill, decode)
        sent: set[int] = set()

        def are_given_back() -> bool:
            sent.update(at for at, each in enumerate(prefill) if each.half.collect({"a"}).sent)
            return len(sent) == len(prefill)

        until(are_given_back, "the receipts")


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 1)])
def test_layers_of_both_shapes_are_pushed(sizes: tuple[int, int]) -> None:
    with engine("prefill", sizes[0]) as prefill, engine("decode", sizes[1]) as decode:
        ranks = tuple(worker.rank for worker in prefill)
        for worker in decode:
            worker.half.step(order(ExpectedPush(KEY, ranks, "digest")))
        for worker in prefill:
            chunk = Chunk("a", KEY, "digest", (SRC,), 0, NUM_TOKENS, NUM_TOKENS)
            worker.half.before_forward(Step(chunks=[chunk]))
            for name in SHAPES:
                worker.half.layer_done(name)
            worker.half.after_forward(whole=True)
        assert not any(result.failed for result in ended(decode, prefill))
        assert_arrived(prefill, decode)


def test_a_draft_that_lacks_bytes_is_not_taken_for_whole() -> None:
    with engine("prefill") as prefill, engine("decode") as decode:
        source = handover(prefill)
        (_, lease) = prefill[0].half._kept._kept.popitem()[1].leases
        lease.revoke_blocking()
        decode[0].half.step(order(source))
        (result,) = ended(decode, prefill)
        assert result.failed == {"a": set(DST)}
