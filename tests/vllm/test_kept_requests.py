"""Requests that are kept for readers, with vLLM's own scheduler: which of them wait, and which give way."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import RequestOutputKind
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvxfer.connectors.common.step import News
from kvxfer.connectors.vllm import request as vllm_request
from kvxfer.connectors.vllm.metadata import WorkerMetadata
from tests.vllm.stepping import BLOCK_SIZE, TO_PREFILL, Answers, Engine, Make, request
from tests.vllm.test_scheduler import PROMPT, assert_empty, from_prefill


def told(*, claimed: str = "", returning: str = "") -> Answers:
    """The answers of workers that received claims of these requests."""
    names = frozenset(claimed.split()) | frozenset(returning.split())
    return Answers(told_by_workers=WorkerMetadata({}, News(names, frozenset(returning.split()))))


def abandon(engine: Engine, *names: str) -> None:
    """Prefills prompts of three blocks each, one after the other, that no reader fetches."""
    for name in names:
        engine.add(request([ord(name)] * len(PROMPT), 1, TO_PREFILL, name))
        for _ in range(3):
            engine.step()
    assert engine.can_be_sent == set(names)


def given_way(engine: Engine, answers: Answers | None = None, num_steps: int = 4) -> list[str]:
    """Steps, and gives requests back that give way, one step later as workers do; returns them."""
    found: list[str] = []
    for _ in range(num_steps):
        now = engine.step(answers).given_way
        answers = Answers(sent=set(now))
        found += now
    return found


# ---- prefill ----------------------------------------------------------------------------------


def test_a_request_that_waits_has_the_blocks_of_the_oldest_that_nobody_has_claimed(
    make: Make,
    overlapping: bool,
) -> None:
    engine = make("kv_producer", num_blocks=1 + 13, overlapping=overlapping, claim_within_s=0.0)
    abandon(engine, *"abcd")
    engine.step(told(claimed="a"))
    engine.add(request([7] * 4 * BLOCK_SIZE, 1, TO_PREFILL, "next"))
    # One block is free; four are needed, and each has three.
    assert given_way(engine) == ["b", "c"]
    assert engine.finished["next"] == "length"
    assert engine.can_be_sent == {"a", "d", "next"}
    assert_empty(engine)


def test_what_two_workers_keep_is_kept_once_and_until_the_last_has_given_it_back(
    make: Make,
    overlapping: bool,
) -> None:
    engine = make("kv_producer", overlapping=overlapping)
    abandon(engine, *"abc")
    workers = KVOutputAggregator(2)  # as two of tensor parallelism
    kept = [engine.counted.data["kept"]]
    for sent in ({"a"}, set()), ({"b"}, {"a"}), (set(), {"b"}):
        engine.step(Answers(sent=workers_sent(workers, *sent)))
        engine.step()  # with overlapping steps, this step processes it
        kept.append(engine.counted.data["kept"])
    assert kept == [3, 3, 2, 1]
    assert_empty(engine)
    assert engine.counted.data["kept"] == 0


def workers_sent(workers: KVOutputAggregator, *sent: set[str]) -> set[str]:
    """Returns the requests that the engine takes for sent, from the report of each worker."""
    outputs: list[ModelRunnerOutput | None] = [
        ModelRunnerOutput([], {}, kv_connector_output=KVConnectorOutput(finished_sending=each))
        for each in sent
    ]
    whole = workers.aggregate(outputs)
    assert whole is not None
    assert whole.kv_connector_output is not None
    return whole.kv_connector_output.finished_sending or set()


def test_a_request_that_has_just_ended_is_safe(make: Make, overlapping: bool) -> None:
    engine = make("kv_producer", num_blocks=1 + 6, overlapping=overlapping, claim_within_s=600.0)
    abandon(engine, *"ab")
    engine.add(request(PROMPT, 1, TO_PREFILL, "next"))
    assert given_way(engine) == []
    assert "next" not in engine.finished
    assert_empty(engine)


def test_all_abandoned_prompts_together_keep_nobody_from_being_computed(
    make: Make,
    overlapping: bool,
) -> None:
    engine = make("kv_producer", num_blocks=1 + 20, overlapping=overlapping, claim_within_s=0.0)
    names = [chr(ord("a") + number) for number in range(60)]
    for name in names:
        engine.add(request([ord(name)] * len(PROMPT), 1, TO_PREFILL, name))
    answers = Answers()
    for _ in range(400):
        answers = Answers(sent=set(engine.step(answers).given_way))
    assert engine.finished.keys() == set(names)
    assert_empty(engine)


def running_beside_a_kept_one(make: Make, overlapping: bool) -> tuple[Engine, Any]:
    """A running request that has all blocks except those kept for another, and will need more."""
    engine = make("kv_both", num_blocks=1 + 6, overlapping=overlapping, claim_within_s=600.0)
    abandon(engine, "a")
    grows = request(list(range(len(PROMPT))), 3 * BLOCK_SIZE, None, "grows")
    engine.add(grows)
    engine.step(told(claimed="a"))
    for _ in range(20):
        if grows.num_computed_tokens < 3 * BLOCK_SIZE - 1:
            engine.step()
    assert grows.num_computed_tokens == 3 * BLOCK_SIZE - 1
    return engine, grows


def test_a_request_is_not_preempted_while_blocks_are_about_to_return(
    make: Make,
    overlapping: bool,
) -> None:
    engine, grows = running_beside_a_kept_one(make, overlapping)
    engine.step(told(returning="a"))
    for _ in range(5):
        engine.step()
    engine.step(Answers(sent={"a"}))
    engine.run(6 * BLOCK_SIZE)
    assert engine.finished["grows"] == "length"
    assert grows.num_preemptions == 0
    assert_empty(engine)


def test_a_request_is_preempted_where_blocks_may_stay_for_long(
    make: Make,
    overlapping: bool,
) -> None:
    engine, grows = running_beside_a_kept_one(make, overlapping)
    for _ in range(5):
        engine.step()
    assert grows.num_preemptions > 0
    assert_empty(engine)


# ---- decode -----------------------------------------------------------------------------------


def claims(engine: Engine, num_steps: int) -> tuple[list[str], list[str]]:
    """Steps; returns the claimed requests, and those that are no longer claimed."""
    steps = [engine.step() for _ in range(num_steps)]
    claimed = [each.request_id for step in steps for each in step.claimed]
    return claimed, [name for step in steps for name in step.unclaimed]


def test_a_request_is_claimed_from_its_arrival_until_its_cache_is_here(
    make: Make,
    overlapping: bool,
) -> None:
    engine = make("kv_consumer", num_blocks=1 + 4, overlapping=overlapping)
    engine.add(from_prefill(PROMPT, 3, "a"), from_prefill(PROMPT[::-1], 3, "b"))
    # The second waits for room; both are wanted.
    assert claims(engine, 6) == (["a", "b"], [])
    assert engine.fetching.keys() == {"a"}
    engine.step(Answers(received={"a"}))
    assert claims(engine, 8) == ([], ["a"])
    assert engine.fetching.keys() == {"b"}
    engine.abort("b")
    assert claims(engine, 3) == ([], ["b"])
    assert_empty(engine)


def test_a_request_that_ends_while_it_waits_is_claimed_no_more(
    make: Make,
    overlapping: bool,
) -> None:
    engine = make("kv_consumer", num_blocks=1 + 4, overlapping=overlapping)
    engine.add(from_prefill(PROMPT, 3, "a"), from_prefill(PROMPT[::-1], 3, "b"))
    engine.step()
    engine.abort("b")
    step = engine.step()
    assert step.unclaimed == ["b"]
    assert [each.request_id for each in step.released] == ["prefilled b"]
    assert_empty(engine)


def test_what_cannot_be_fetched_is_not_claimed(make: Make) -> None:
    damaged = from_prefill(PROMPT, 3, "a", kvxfer=None)
    for role, arrived in (("kv_consumer", damaged), ("kv_producer", from_prefill(PROMPT, 3, "b"))):
        engine = make(role)
        engine.add(arrived)
        assert claims(engine, 1) == ([], [])
        assert_empty(engine)


# ---- answers that nobody learns of ------------------------------------------------------------


@pytest.mark.parametrize("tells", [False, True], ids=["as in 0.32", "as from 0.33 on"])
@pytest.mark.parametrize("is_return", [False, True], ids=["prefill", "decode"])
def test_what_a_stream_does_not_tell_is_not_kept(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    tells: bool,
    is_return: bool,
) -> None:
    monkeypatch.setattr(vllm_request, "_streams_tell", lambda: tells)
    engine = make("kv_both", return_decoded=True)
    made = from_prefill(PROMPT, 3, "a") if is_return else request(PROMPT, 1, TO_PREFILL, "a")
    assert made.sampling_params is not None
    made.sampling_params.output_kind = RequestOutputKind.DELTA
    engine.add(made)
    engine.step()
    if is_return:
        engine.step(Answers(received={"a"}))
    for _ in range(5):
        engine.step()
    assert engine.finished == {"a": "length"}
    assert (engine.num_blocks_in_use > 0) == tells
    assert ("a" in engine.told) == tells
    assert_empty(engine)


def test_an_answer_as_a_whole_tells_what_is_kept(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_request, "_streams_tell", lambda: False)
    engine = make("kv_both", return_decoded=True)
    made = from_prefill(PROMPT, 3, "a")
    assert made.sampling_params is not None
    made.sampling_params.output_kind = RequestOutputKind.FINAL_ONLY
    engine.add(made)
    engine.step()
    engine.step(Answers(received={"a"}))
    for _ in range(5):
        engine.step()
    assert engine.told["a"]["kvxfer"]["keep_s"] == 120.0
    assert_empty(engine)
