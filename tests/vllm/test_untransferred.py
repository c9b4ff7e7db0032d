"""Requests that name no cache, with vLLM's own scheduler: counted, refused, or treated as ordinary."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from vllm.v1.request import Request

from kvxfer.connectors.common.step import Unfetchable
from tests.vllm.stepping import BLOCK_SIZE, TO_PREFILL, Answers, Engine, Make, request
from tests.vllm.test_scheduler import PROMPT, assert_empty, from_prefill, lose

# The parameters from a router that lost prefill's answer, or that asks decode as if it were prefill.
NAMELESS: list[dict[str, Any] | None] = [None, {}, {"do_remote_prefill": False}, TO_PREFILL]


def ask(engine: Engine, made: Request) -> str:
    """Runs a request until it is computed or fails; returns how it ended."""
    engine.add(made)
    for _ in range(8):
        answers = Answers()
        for request_id, order in engine.fetching.items():
            if not isinstance(order.source, Unfetchable):
                answers.received.add(request_id)  # its cache arrived
                continue
            answers = lose(engine, request_id, order.first_token // BLOCK_SIZE)
        engine.step(answers)
    return engine.finished[made.request_id]


def num_counted(engine: Engine) -> int:
    return int(engine.counted.data["untransferred"])


def own_words(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns what the connector has logged."""
    return [record.getMessage() for record in caplog.records if record.name == "kvxfer"]


@pytest.mark.parametrize("params", NAMELESS, ids=str)
@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_a_request_that_names_no_cache_is_refused_where_a_transfer_is_required(
    make: Make,
    overlapping: bool,
    role: str,
    num_groups: int,
    params: dict[str, Any] | None,
) -> None:
    engine = make(role, num_groups=num_groups, overlapping=overlapping, require_transfer=True)
    is_prefill = role == "kv_both" and params == TO_PREFILL
    assert ask(engine, request(PROMPT, 1, params, "a")) == ("length" if is_prefill else "error")
    assert num_counted(engine) == (not is_prefill)
    assert ask(engine, from_prefill(PROMPT, request_id="b", num_groups=num_groups)) == "length"
    assert_empty(engine)
    assert num_counted(engine) == (not is_prefill)


def test_a_refused_request_is_told_to_the_workers_in_words(make: Make) -> None:
    engine = make("kv_consumer", require_transfer=True)
    engine.add(request(PROMPT, 1, None, "a"))
    (order,) = engine.step().fetches
    assert isinstance(order.source, Unfetchable)
    assert order.source.code == "no-handover"
    assert order.source.why == (
        "it names no cache, and 40 tokens of its prompt would have to be computed here (require_transfer): "
        "the router has to pass prefill's kv_transfer_params on"
    )
    engine.abort("a")
    assert_empty(engine)


def test_forwards_that_wait_for_their_caches_refuse_as_well(make: Make, overlapping: bool) -> None:
    engine = make("kv_consumer", overlapping=overlapping, require_transfer=True, loads="synchronous")
    engine.add(request(PROMPT, 4, None, "a"))
    (order,) = engine.step().fetches
    assert order.waits
    # The request runs by now, and its first token is dropped.
    del engine.fetching["a"]
    engine.step(Answers(invalid_blocks=set(order.tables[0])))
    engine.run()
    assert engine.finished == {"a": "error"}
    assert_empty(engine)


@pytest.mark.parametrize("params", NAMELESS, ids=str)
def test_a_decode_that_computes_it_says_so_once_in_a_while_and_counts_each(
    make: Make,
    overlapping: bool,
    params: dict[str, Any] | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make("kv_consumer", overlapping=overlapping)
    with caplog.at_level(logging.WARNING, "kvxfer"):
        for name in "abc":
            assert ask(engine, request([ord(name)] * len(PROMPT), 1, params, name)) == "length"
    (said,) = own_words(caplog)
    assert "request a names no cache: this decode engine computes 40 tokens of its prompt itself" in said
    assert num_counted(engine) == 3
    assert_empty(engine)


def test_an_engine_of_both_roles_computes_what_it_is_asked_for(
    make: Make,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make("kv_both")
    for params in NAMELESS:
        assert ask(engine, request(PROMPT, 1, params)) == "length"
    assert num_counted(engine) == 0
    assert not own_words(caplog)
    assert_empty(engine)


@pytest.mark.parametrize("require_transfer", [False, True])
def test_what_costs_decode_next_to_nothing_is_its_own(
    make: Make,
    overlapping: bool,
    require_transfer: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make("kv_consumer", overlapping=overlapping, require_transfer=require_transfer)
    # One token, as with models with states, and one block.
    assert ask(engine, request([7], 4)) == "length"
    assert ask(engine, request([7] * BLOCK_SIZE, 4)) == "length"
    # A prompt in the prefix cache: one that was handed over is requested again.
    assert ask(engine, from_prefill(PROMPT)) == "length"
    for prompt in (PROMPT[: 2 * BLOCK_SIZE], PROMPT):
        assert ask(engine, request(prompt, 4)) == "length"
    assert num_counted(engine) == 0
    assert not own_words(caplog)
    assert_empty(engine)


def test_routers_that_send_short_prompts_to_decode_alone_say_how_short(make: Make) -> None:
    engine = make("kv_consumer", require_transfer=True, short_prompt_tokens=len(PROMPT))
    assert ask(engine, request(PROMPT, 4)) == "length"
    assert ask(engine, request([*PROMPT, 7], 4)) == "length", "it has all but a token from the prefix cache"
    assert ask(engine, request([7, *PROMPT], 4, None, "longer")) == "error"
    assert_empty(engine)


def test_a_request_that_was_handed_over_is_none_when_it_comes_again(
    make: Make,
    overlapping: bool,
) -> None:
    engine = make("kv_consumer", overlapping=overlapping, require_transfer=True)
    engine.add(from_prefill(PROMPT, 8, "a"))
    engine.step()
    engine.step(Answers(received={"a"}))
    engine.step()
    # Preempted, with all that was cached: it is computed.
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    assert engine.finished == {"a": "length"}
    assert num_counted(engine) == 0
    assert_empty(engine)


def test_one_that_waits_for_room_is_counted_once(make: Make) -> None:
    engine = make("kv_consumer", num_blocks=1 + 4, require_transfer=True)
    engine.add(from_prefill([7] * 3 * BLOCK_SIZE, 4, "first"), request(PROMPT, 1, None, "a"))
    for _ in range(5):
        engine.step()
    assert num_counted(engine) == 1
    assert "a" not in engine.fetching
    engine.step(Answers(received={"first"}))
    engine.run(8)
    assert engine.finished["first"] == "length"
    engine.step(lose(engine, "a", 0))
    engine.step()
    assert engine.finished["a"] == "error"
    assert num_counted(engine) == 1
    assert_empty(engine)


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_what_vllm_would_compute_cannot_be_refused_which_is_said_at_the_start(
    make: Make,
    role: str,
) -> None:
    with pytest.raises(ValueError, match='require_transfer needs kv_load_failure_policy "fail"'):
        make(role, policy="recompute", require_transfer=True)


def test_prefill_that_has_decodes_settings_computes_as_ever(make: Make) -> None:
    engine = make("kv_producer", policy="recompute", require_transfer=True)
    for params in NAMELESS:
        assert ask(engine, request(PROMPT, 1, params)) == "length"
    assert num_counted(engine) == 0
    assert_empty(engine)
