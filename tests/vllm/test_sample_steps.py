"""Samples of one prompt beside vLLM's own scheduler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import Request

from kvxfer import LeaseToken
from kvxfer.bench.engines import tiny_models
from kvxfer.connectors.common.handover import Handover
from kvxfer.connectors.vllm.request import VllmRequest
from kvxfer.directory import Entry
from tests.vllm.stepping import BLOCK_SIZE, NUM_BLOCKS, TO_PREFILL, Answers, Engine, caches, config, request

PROMPT = list(range(2 * BLOCK_SIZE + 8))
PREFILL = Entry("prefill.0", "tcp://127.0.0.1:7301", bytes(16))
FIRST, SECOND, THIRD = NAMES = tuple(f"{number}_parent-0123abcd" for number in range(3))
Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    weights: Path = tiny_models.save("llama", tmp_path_factory.mktemp("samples") / "model")

    def make(role: str, num_blocks: int = NUM_BLOCKS, **options: Any) -> Engine:
        return Engine(config(weights, role, **options), caches(1, num_blocks))

    return make


@pytest.fixture(params=[False, True], ids=["one at a time", "overlapping"])
def overlapping(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def handed(names: tuple[str, ...] = NAMES, max_tokens: int = 4) -> list[Request]:
    """Requests that one handover came with."""
    made = [request(PROMPT, max_tokens, {}, name) for name in names]
    blocks = tuple(range(1, -(-len(PROMPT) // BLOCK_SIZE) + 1))
    handover = Handover(
        "prefilled", (PREFILL,), (LeaseToken.draw(),), (blocks,), (BLOCK_SIZE,), (1,), len(PROMPT)
    )
    for each in made:
        each.kv_transfer_params = handover.params("prefill", VllmRequest(each))
    return made


def assert_empty(engine: Engine) -> None:
    engine.settle()
    assert engine.num_blocks_in_use == 0
    assert not engine.kept
    assert not engine.fetching
    half = engine.connector._deciding
    assert not half._samples
    assert not half._sources


def test_the_first_fetches_and_the_others_go_on_from_what_it_brought(make: Make, overlapping: bool) -> None:
    engine = make("kv_consumer", overlapping=overlapping)
    first, *others = handed()
    engine.add(first)
    (order,) = engine.step().fetches
    engine.add(*others)
    for _ in range(3):
        assert not engine.step().fetches
    assert engine.num_blocks_in_use == 3
    step = engine.step(Answers(received={FIRST}))
    assert order.request_id == FIRST
    scheduled: dict[str, int] = {}
    for _ in range(2):
        output = engine.scheduler.schedule()
        for name, count in output.num_scheduled_tokens.items():
            scheduled.setdefault(name, count)
        if len(scheduled) == 3:
            break
    # A token of the first; the others lack what is in no whole block.
    assert scheduled == {FIRST: 1, SECOND: 8, THIRD: 8}
    assert not step.released


def test_all_are_answered_and_nothing_stays(make: Make, overlapping: bool) -> None:
    engine = make("kv_consumer", overlapping=overlapping)
    engine.add(*handed())
    engine.step()
    engine.step(Answers(received=set(engine.fetching)))
    engine.run()
    assert engine.finished == dict.fromkeys(NAMES, "length")
    assert engine.tokens == dict.fromkeys(NAMES, 4)
    assert_empty(engine)


def test_one_that_comes_when_the_first_has_ended_is_computed(make: Make) -> None:
    # The front end sends them one by one, and the engine may be faster.
    engine = make("kv_consumer")
    engine.add(*handed((FIRST,), 1))
    assert engine.step().fetches
    engine.step(Answers(received={FIRST}))
    engine.run()
    engine.scheduler.reset_prefix_cache()
    engine.add(*handed((SECOND,), 1))
    step = engine.step()
    assert not step.fetches
    assert not step.released
    engine.run()
    assert engine.finished == {FIRST: "length", SECOND: "length"}
    assert_empty(engine)


def test_prefill_tells_one_that_comes_late_what_it_told_the_first(make: Make) -> None:
    engine = make("kv_producer")
    for name in NAMES:
        engine.add(request(PROMPT, 1, TO_PREFILL, name))
        engine.run()
    assert engine.kept.keys() == {FIRST}
    assert engine.told[THIRD] == engine.told[FIRST]
    assert_empty(engine)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_fetch_that_failed_is_not_tried_by_the_others(make: Make, overlapping: bool, policy: str) -> None:
    engine = make("kv_consumer", policy=policy, overlapping=overlapping)
    engine.add(*handed())
    (order,) = engine.step().fetches
    engine.step(Answers(received={FIRST}, invalid_blocks=set(order.tables[0])))
    engine.run()
    assert not engine.fetching
    assert engine.finished[FIRST] == ("error" if policy == "fail" else "length")
    # Where one fails the engine's server fails the request that it is a sample of.
    assert engine.finished[SECOND] == engine.finished[THIRD] == "length"
    assert_empty(engine)


def test_while_one_fetches_no_other_gives_it_back(make: Make, overlapping: bool) -> None:
    engine = make("kv_consumer", overlapping=overlapping)
    engine.add(*handed())
    engine.step()
    engine.abort(SECOND)
    assert not engine.step().released
    engine.step(Answers(received={FIRST}))
    engine.run()
    assert engine.finished == {FIRST: "length", THIRD: "length"}
    assert_empty(engine)


def test_what_none_has_begun_to_fetch_is_given_back_once(make: Make) -> None:
    engine = make("kv_consumer")
    engine.add(*handed())
    for name in NAMES:
        engine.abort(name)
    assert [each.request_id for each in engine.step().released] == ["prefilled"]
    assert_empty(engine)


def test_prefill_keeps_one_and_the_last_tells_of_it(make: Make, overlapping: bool) -> None:
    engine = make("kv_producer", overlapping=overlapping)
    engine.add(
        *(
            request(PROMPT, max_tokens, TO_PREFILL, name)
            for name, max_tokens in zip(NAMES, (1, 2, 3), strict=True)
        )
    )
    (grant,) = engine.step().grants
    assert grant.request_id == FIRST
    for _ in range(6):
        assert not engine.step().grants
    assert engine.finished == dict.fromkeys(NAMES, "length")
    assert engine.told[THIRD] == engine.told[SECOND] == engine.told[FIRST]
    assert engine.told[THIRD]["remote_request_id"] == FIRST
    assert engine.can_be_sent == {FIRST}
    assert engine.num_blocks_in_use == 3
    assert_empty(engine)


def test_prefill_pushes_one(make: Make, overlapping: bool) -> None:
    engine = make("kv_producer", overlapping=overlapping)
    params = {**TO_PREFILL, "kvxfer": {"version": 1, "push": "0" * 32}}
    engine.add(*(request(PROMPT, 1, params, name) for name in NAMES))
    step = engine.step()
    assert [chunk.request_id for chunk in step.chunks] == [FIRST]
    assert not step.grants


def test_names_that_a_user_chose_make_no_samples(make: Make) -> None:
    engine = make("kv_both")
    names = ("0_a", "1_a", "0_b-0123abcd", "0_b-0123abce")
    engine.add(*(request([number, *PROMPT], 1, TO_PREFILL, name) for number, name in enumerate(names)))
    engine.run()
    assert [engine.told[name]["remote_request_id"] for name in names] == list(names)
    assert_empty(engine)
