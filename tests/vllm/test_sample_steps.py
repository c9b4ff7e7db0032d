"""Samples of one prompt, and prompts of one request, beside vLLM's own scheduler."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.request import Request

from kvxfer import LeaseToken
from kvxfer.connectors.common.expected_push import ExpectedPush
from kvxfer.connectors.common.handover import Handover
from kvxfer.connectors.vllm.request import VllmRequest
from kvxfer.directory import Entry
from tests.vllm.stepping import (
    BLOCK_SIZE,
    TO_PREFILL,
    Answers,
    Engine,
    Make,
    request,
)

PROMPT = list(range(2 * BLOCK_SIZE + 8))
PREFILL = Entry("prefill.0", "tcp://127.0.0.1:7301", bytes(16))
FIRST, SECOND, THIRD = NAMES = tuple(f"{number}_parent-0123abcd" for number in range(3))


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
    # One token of the first sample; the others lack the tokens outside of whole blocks.
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
    # If one sample fails, the engine's server fails its whole request.
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


@pytest.mark.parametrize(
    ("engine_id", "names", "may_be"),
    [("engine", NAMES, False), ("engine_dp1", NAMES, True), ("engine_dp1", ("alone-0123abcd",), False)],
)
def test_the_engine_that_keeps_a_prompt_is_told_that_other_ranks_may_have_samples_of_it(
    make: Make, engine_id: str, names: tuple[str, ...], may_be: bool
) -> None:
    engine = make("kv_consumer", engine_id=engine_id)
    first = handed(names)[0]
    engine.add(first)
    (order,) = engine.step().fetches
    assert order.source.may_be_shared == may_be
    engine.step(Answers(received={first.request_id}))
    engine.run()
    # The same if nothing is fetched: the prefix cache has it now, or no sample waits any more.
    second = make("kv_consumer", engine_id=engine_id)
    second.add(*handed(names))
    for name in names:
        second.abort(name)
    (released,) = second.step().released
    assert released.may_be_shared == may_be
    assert_empty(second)


OTHER = [number + 1 for number in PROMPT]


def batch(name: str, *prompts: list[int], **params: Any) -> list[Request]:
    """Several prompts of one request with the given name."""
    return [request(prompt, 1, params, f"cmpl-{name}-{at}-0123abcd") for at, prompt in enumerate(prompts)]


def test_prompts_beside_the_one_that_is_told_of_are_pushed(make: Make, overlapping: bool) -> None:
    prefill = make("kv_producer", overlapping=overlapping)
    asked = batch("asked", PROMPT, OTHER, **TO_PREFILL)
    prefill.add(*asked)
    step = prefill.step()
    assert [grant.request_id for grant in step.grants] == [asked[0].request_id]
    (chunk,) = step.chunks
    assert chunk.request_id == asked[1].request_id
    prefill.run()
    params = prefill.told[asked[0].request_id]
    params["kvxfer"]["ranks"] = [PREFILL.to_dict()]  # both engines have the same name here
    # Prefill's server returns the handover of the first prompt, and the router passes it to all prompts.
    decode = make("kv_consumer", overlapping=overlapping)
    wanted = batch("wanted", PROMPT, OTHER, **params)
    decode.add(*wanted)
    fetches = {order.request_id: order.source for order in decode.step().fetches}
    read, pushed = (fetches[each.request_id] for each in wanted)
    assert isinstance(read, Handover)
    assert isinstance(pushed, ExpectedPush)
    assert (pushed.key, pushed.prompt) == (chunk.key, chunk.prompt)
    assert pushed.ranks == read.ranks
    for engine in (prefill, decode):
        assert_empty(engine)


def test_each_prompt_of_a_push_has_its_key(make: Make) -> None:
    own = {"version": 1, "push": "0" * 32}
    prefill, decode = make("kv_producer"), make("kv_consumer")
    prefill.add(*batch("asked", PROMPT, OTHER, PROMPT, **TO_PREFILL, kvxfer=own))
    keys = [chunk.key for chunk in prefill.step().chunks]
    assert len(set(keys)) == 3
    place = {"do_remote_prefill": True, "kvxfer": {**own, "ranks": [PREFILL.to_dict()]}}
    decode.add(*batch("wanted", PROMPT, OTHER, PROMPT, **place))
    assert sorted(order.source.key for order in decode.step().fetches) == sorted(keys)


@pytest.mark.parametrize("name", ["cmpl-6ec1-0-0123abcd", "chatcmpl-6ec1-0123abcd"])
def test_engines_that_are_asked_at_once_by_one_name_find_each_other(make: Make, name: str) -> None:
    """As vLLM's own proxy for pushes asks them."""
    prefill, decode = make("kv_producer", mode="push"), make("kv_consumer")
    asked = {**TO_PREFILL, "remote_engine_id": None, "remote_block_ids": None, "remote_host": None}
    prefill.add(request(PROMPT, 1, asked, name))
    (chunk,) = prefill.step().chunks
    place = {"remote_engine_id": "engine", "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1}
    wanted = {**place, "do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": "6ec1"}
    decode.add(request(PROMPT, 4, wanted, name.replace("0123abcd", "fedc9876")))
    (order,) = decode.step().fetches
    assert (order.source.key, order.source.prompt) == (chunk.key, chunk.prompt)


def test_names_that_a_user_chose_make_no_samples(make: Make) -> None:
    engine = make("kv_both")
    names = ("0_a", "1_a", "0_b-0123abcd", "0_b-0123abce")
    engine.add(*(request([number, *PROMPT], 1, TO_PREFILL, name) for number, name in enumerate(names)))
    engine.run()
    assert [engine.told[name]["remote_request_id"] for name in names] == list(names)
    assert_empty(engine)
