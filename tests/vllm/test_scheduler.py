"""The scheduler half with vLLM's own scheduler, without a model: no block is lost or assigned twice."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
from vllm.v1.request import Request, RequestStatus

from kvxfer import LeaseToken
from kvxfer.connectors.common.handover import Handover
from kvxfer.connectors.common.step import Grant, News, Step, Unfetchable
from kvxfer.connectors.vllm.metadata import StepMetadata, WorkerMetadata
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

# Prompts end within a block, as most do.
PROMPT = list(range(2 * BLOCK_SIZE + 8))
PREFILL = Entry("prefill.0", "tcp://127.0.0.1:7301", bytes(16))


def from_prefill(
    prompt: list[int], max_tokens: int = 4, request_id: str = "", num_groups: int = 1, **damage: Any
) -> Request:
    """A request as a router sends it to decode after prefill has ended."""
    made = request(prompt, max_tokens, {}, request_id)
    num_blocks = -(-len(prompt) // BLOCK_SIZE)
    handover = Handover(
        request_id=f"prefilled {made.request_id}",
        ranks=(PREFILL,),
        leases=tuple(LeaseToken.draw() for _ in range(num_groups)),
        tables=(tuple(range(1, num_blocks + 1)),) * num_groups,
        block_sizes=(BLOCK_SIZE,) * num_groups,
        pages_per_block=(1,) * num_groups,
        num_tokens=len(prompt),
    )
    made.kv_transfer_params = {**handover.params("prefill", VllmRequest(made)), **damage}
    return made


def assert_empty(engine: Engine) -> None:
    """Asserts that no block or request is held, and that the connector remembers nothing."""
    engine.settle()
    assert engine.num_blocks_in_use == 0
    assert all(block.ref_cnt == 0 for block in engine.pool.blocks if not block.is_null)
    assert not engine.scheduler.requests
    assert not engine.kept
    assert not engine.fetching
    for name, value in vars(engine.connector._deciding).items():
        assert not isinstance(value, dict | set | list) or not value, f"{name} still has {value}"
    assert engine.step() == Step()


# ---- prefill ----------------------------------------------------------------------------------


def test_what_prefill_tells_is_granted_and_held_until_it_was_read(make: Make, overlapping: bool) -> None:
    engine = make("kv_producer", overlapping=overlapping)
    engine.add(request(PROMPT, 1, TO_PREFILL, "a"))
    (grant,) = engine.step().grants
    assert len(grant.tables[0]) == 3
    for _ in range(5):
        engine.step()
    assert engine.finished == {"a": "length"}
    told = engine.told["a"]
    assert told["do_remote_prefill"]
    assert told["remote_block_ids"] == [list(grant.tables[0])]
    assert told["kvxfer"]["leases"] == [str(lease) for lease in grant.leases]
    assert engine.can_be_sent == {"a"}
    assert engine.num_blocks_in_use == 3
    engine.step(Answers(sent={"a"}))
    engine.step()
    assert engine.num_blocks_in_use == 0
    assert_empty(engine)


def test_a_router_that_knows_the_reader_has_the_leases_granted_to_it(make: Make, overlapping: bool) -> None:
    engine = make("kv_producer", overlapping=overlapping)
    own = [None, {"version": 1}, {"version": 1, "reader": "decode/0"}, {"version": 1, "reader": 7}]
    engine.add(
        *(
            request([ord(name)] * len(PROMPT), 1, {**TO_PREFILL, "kvxfer": each}, name)
            for name, each in zip("abcd", own, strict=True)
        )
    )
    granted: dict[str, Grant] = {}
    for _ in range(8):
        granted |= {grant.request_id: grant for grant in engine.step().grants}
    # Parameters that cannot be read name no readers.
    assert {name: grant.readers for name, grant in granted.items()} == {
        "a": (),
        "b": (),
        "c": ("decode_0",),
    }


def test_a_prompt_in_chunks_is_granted_with_its_last(make: Make, overlapping: bool) -> None:
    engine = make("kv_producer", batch_tokens=BLOCK_SIZE, overlapping=overlapping)
    engine.add(request(PROMPT, 1, TO_PREFILL, "a"))
    assert not engine.step().grants
    assert not engine.step().grants
    (grant,) = engine.step().grants
    assert len(grant.tables[0]) == 3
    assert_empty(engine)
    assert engine.told["a"]["remote_block_ids"] == [list(grant.tables[0])]


def test_a_request_that_lost_its_blocks_is_granted_the_new_ones(make: Make, overlapping: bool) -> None:
    engine = make("kv_producer", overlapping=overlapping)
    engine.add(request(PROMPT, 8, TO_PREFILL, "a"))
    (before,) = engine.step().grants
    engine.step()
    # All requests are preempted and the prefix cache is reset: the prompt is computed in other blocks.
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    step = engine.step()
    (after,) = step.grants
    assert step.withdrawn == ["a"]
    assert before.tables != after.tables
    assert not set(before.leases) & set(after.leases)
    assert_empty(engine)
    assert engine.told["a"]["remote_block_ids"] == [list(after.tables[0])]
    assert engine.told["a"]["kvxfer"]["leases"] == [str(lease) for lease in after.leases]


def test_a_cache_that_is_too_small_for_all_hands_all_over(make: Make, overlapping: bool) -> None:
    # Both grow until one is preempted for the other, and runs again later.
    engine = make("kv_producer", num_blocks=9, overlapping=overlapping)
    both = [request([ord(name)] * 3 * BLOCK_SIZE, 3 * BLOCK_SIZE, TO_PREFILL, name) for name in "ab"]
    engine.add(*both)
    granted: dict[str, Grant] = {}
    for _ in range(12 * BLOCK_SIZE):
        step = engine.step(Answers(sent=set(engine.can_be_sent)))
        granted |= {grant.request_id: grant for grant in step.grants}
    assert sum(each.num_preemptions for each in both) > 0
    assert engine.finished == {"a": "length", "b": "length"}
    for name, grant in granted.items():
        assert engine.told[name]["remote_block_ids"] == [list(grant.tables[0])]
        assert engine.told[name]["kvxfer"]["leases"] == [str(lease) for lease in grant.leases]
    assert_empty(engine)


@pytest.mark.parametrize("after", [0, 1, 2, 3, 4, 5])
def test_an_aborted_prefill_leaves_nothing(make: Make, overlapping: bool, after: int) -> None:
    # Before it was scheduled, between its chunks, with its last, and while it decodes.
    engine = make("kv_producer", batch_tokens=BLOCK_SIZE, overlapping=overlapping)
    engine.add(request(PROMPT, 8, TO_PREFILL, "a"))
    for _ in range(after):
        engine.step()
    engine.abort("a")
    assert not engine.told
    engine.step()
    assert not engine.kept
    assert_empty(engine)
    assert not engine.told


def test_who_does_not_know_its_workers_hands_nothing_over(make: Make) -> None:
    engine = make("kv_producer", has_ranks=False)
    engine.add(request(PROMPT, 1, TO_PREFILL, "a"))
    engine.run()
    assert engine.finished == {"a": "length"}
    assert not engine.told
    assert engine.num_blocks_in_use == 0
    assert_empty(engine)


@pytest.mark.parametrize(
    ("role", "params"), [("kv_consumer", TO_PREFILL), ("kv_producer", None), ("kv_both", {})]
)
def test_a_request_that_is_not_to_be_handed_over_is_not(
    make: Make, role: str, params: dict[str, Any] | None
) -> None:
    engine = make(role)
    engine.add(request(PROMPT, 2, params))
    engine.run()
    assert not engine.told
    assert engine.num_blocks_in_use == 0
    assert_empty(engine)


def test_blocks_that_left_the_window_are_not_told(make: Make, overlapping: bool) -> None:
    engine = make("kv_producer", num_groups=2, overlapping=overlapping)
    prompt = list(range(6 * BLOCK_SIZE))
    engine.add(request(prompt, 1, TO_PREFILL, "a"))
    for _ in range(4):
        engine.step()
    whole, windowed = engine.told["a"]["remote_block_ids"]
    assert all(whole)
    assert not any(windowed[:3])
    assert all(windowed[-2:])
    held = engine.blocks_of("a")
    assert {block for block in windowed if block} <= set(held[1])
    assert_empty(engine)


@pytest.mark.parametrize("max_tokens", [1, 40])
def test_a_push_is_told_of_every_block_that_leaves_the_window(
    make: Make, overlapping: bool, max_tokens: int
) -> None:
    """Also after the prompt has ended: a prompt of one block gives a block back that decode wants."""
    told_anew = 0
    for num_tokens in range(4 * BLOCK_SIZE, 5 * BLOCK_SIZE):
        engine = make("kv_producer", num_groups=2, overlapping=overlapping)
        push = {"do_remote_decode": True, "kvxfer": {"version": 1, "push": "0" * 32}}
        engine.add(request(list(range(num_tokens)), max_tokens, push, "a"))
        tables: tuple[tuple[int, ...], ...] = ()
        for _ in range(max_tokens + 4):
            step = engine.step()
            tables = next((chunk.tables for chunk in step.chunks), tables)
            tables = next((remainder.tables for remainder in step.remainders), tables)
            told_anew += len(step.remainders)
        # The request finished some steps ago and is still kept.
        for table, blocks in zip(tables, engine.blocks_of("a"), strict=True):
            assert {block for block in table if block} <= set(blocks)
        assert engine.finished == {"a": "length"}
        assert_empty(engine)
    assert told_anew > 0


def test_what_is_waited_for_is_said_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """The scheduler asks in each step in which a request waits for room."""
    engine = make("kv_producer", num_blocks=14)
    engine.add(request(list(range(100, 100 + 12 * BLOCK_SIZE - 20)), 15))
    engine.step()
    engine.step()
    engine.add(from_prefill(list(range(6 * BLOCK_SIZE)), 3, "a"))
    with caplog.at_level(logging.INFO, "kvxfer"):
        for _ in range(10):
            engine.step()
    assert sum("kv_producer" in record.getMessage() for record in caplog.records) == 1


# ---- decode -----------------------------------------------------------------------------------


def test_decode_waits_for_the_cache_and_computes_one_token_of_the_prompt(
    make: Make, overlapping: bool
) -> None:
    engine = make("kv_consumer", overlapping=overlapping)
    engine.add(arrived := from_prefill(PROMPT, request_id="a"))
    (order,) = engine.step().fetches
    assert (order.first_token, order.num_tokens) == (0, len(PROMPT))
    assert order.tables == (tuple(engine.blocks_of("a")[0]),)
    for _ in range(3):
        engine.step()
        assert arrived.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.step(Answers(received={"a"}))
    output = engine.scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 1}
    assert output.scheduled_new_reqs[0].num_computed_tokens == len(PROMPT) - 1


def test_what_decode_fetched_it_decodes(make: Make, overlapping: bool) -> None:
    engine = make("kv_consumer", overlapping=overlapping)
    engine.add(from_prefill(PROMPT, 5, "a"))
    engine.step()
    engine.step(Answers(received={"a"}))
    engine.run()
    assert engine.tokens == {"a": 5}
    assert engine.finished == {"a": "length"}
    assert_empty(engine)


def test_what_is_cached_here_is_not_fetched(make: Make, overlapping: bool) -> None:
    engine = make("kv_consumer", overlapping=overlapping)
    engine.add(from_prefill(PROMPT, request_id="a"))
    engine.step()
    engine.step(Answers(received={"a"}))
    engine.run()
    engine.add(from_prefill([*PROMPT[: 2 * BLOCK_SIZE], 77, 78], request_id="b"))
    (order,) = engine.step().fetches
    assert (order.first_token, order.num_tokens) == (2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 2)
    assert len(order.tables[0]) == 3
    assert_empty(engine)


def test_a_fetch_is_ordered_once_however_long_its_blocks_take(make: Make) -> None:
    engine = make("kv_consumer", num_blocks=6)
    engine.add(from_prefill([1] * 4 * BLOCK_SIZE, request_id="a"), from_prefill(PROMPT, request_id="b"))
    orders = []
    for _ in range(5):
        orders += engine.step().fetches
    assert [order.request_id for order in orders] == ["a"]
    engine.step(Answers(received={"a"}))
    engine.run(10)
    assert engine.fetching.keys() == {"b"}
    assert_empty(engine)
    assert engine.finished.keys() == {"a", "b"}


def lose(engine: Engine, request_id: str, first_lost: int) -> Answers:
    """What the workers report of a fetch that failed from this block of the first group on."""
    lost = set(engine.fetching[request_id].tables[0][first_lost:])
    if len(engine.fetching[request_id].tables) > 1:
        return Answers(received={request_id}, failed={request_id})
    return Answers(received={request_id}, invalid_blocks=lost)


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_fetch_that_failed_ends_its_request_alone(make: Make, overlapping: bool, num_groups: int) -> None:
    engine = make("kv_consumer", num_groups=num_groups, overlapping=overlapping)
    for name, prompt in (("a", PROMPT), ("b", PROMPT[::-1])):
        engine.add(from_prefill(prompt, request_id=name, num_groups=num_groups))
    engine.step()
    engine.step(lose(engine, "a", 1))
    engine.step(Answers(received={"b"}))
    engine.run()
    assert engine.finished == {"a": "error", "b": "length"}
    assert_empty(engine)


@pytest.mark.parametrize(("num_groups", "kept"), [(1, 0), (1, 1), (1, 2), (2, 0)])
def test_a_fetch_that_failed_is_computed_from_what_is_missing_on(
    make: Make, overlapping: bool, num_groups: int, kept: int
) -> None:
    engine = make("kv_consumer", num_groups=num_groups, policy="recompute", overlapping=overlapping)
    engine.add(from_prefill(PROMPT, 3, "a", num_groups))
    engine.step()
    engine.step(lose(engine, "a", kept))
    output = engine.scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": len(PROMPT) - kept * BLOCK_SIZE}
    assert isinstance(output.kv_connector_metadata, StepMetadata)
    assert not output.kv_connector_metadata.step.fetches, "what failed is fetched again"


@pytest.mark.parametrize("num_groups", [1, 2])
def test_what_was_computed_after_a_failure_leaves_nothing(
    make: Make, overlapping: bool, num_groups: int
) -> None:
    engine = make("kv_consumer", num_groups=num_groups, policy="recompute", overlapping=overlapping)
    engine.add(from_prefill(PROMPT, 3, "a", num_groups))
    engine.step()
    engine.step(lose(engine, "a", 0))
    engine.run()
    assert engine.finished == {"a": "length"}
    assert engine.tokens == {"a": 3}
    assert_empty(engine)


def test_parameters_that_cannot_be_used_fail_their_request(make: Make) -> None:
    engine = make("kv_consumer")
    engine.add(from_prefill(PROMPT, request_id="a", kvxfer=None), from_prefill(PROMPT[::-1], request_id="b"))
    orders = {order.request_id: order for order in engine.step().fetches}
    assert isinstance(orders["a"].source, Unfetchable)
    assert isinstance(orders["b"].source, Handover)
    engine.step(lose(engine, "a", 0))
    engine.step(Answers(received={"b"}))
    engine.run()
    assert engine.finished == {"a": "error", "b": "length"}
    assert_empty(engine)


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("state", ["waiting", "fetching", "received", "failed", "running"])
def test_an_aborted_decode_leaves_nothing(make: Make, overlapping: bool, state: str, num_groups: int) -> None:
    engine = make("kv_consumer", num_groups=num_groups, policy="recompute", overlapping=overlapping)
    engine.add(from_prefill(PROMPT, 20, "a", num_groups))
    if state != "waiting":
        engine.step()
        engine.step()
    if state in ("received", "running"):
        engine.step(Answers(received={"a"}))
    elif state == "failed":
        engine.step(lose(engine, "a", 1))
    if state == "running":
        engine.step()
        engine.step()
    engine.abort("a")
    step = engine.step()
    if state == "waiting":
        assert [each.request_id for each in step.released] == ["prefilled a"]
    elif state == "fetching":
        # Bytes may still land.
        assert step.abandoned == ["a"]
        assert engine.num_blocks_in_use > 0
    assert_empty(engine)


def test_a_request_that_the_front_end_refused_is_given_back(make: Make) -> None:
    # The engine passes a stand-in with one token.
    engine = make("kv_consumer")
    params = from_prefill(PROMPT, 4, "a").kv_transfer_params
    assert params is not None
    engine.add(request([0], 1, params, "a"))
    engine.abort("a")
    assert [each.request_id for each in engine.step().released] == ["prefilled a"]
    engine.add(request([0], 1, {**params, "kvxfer": None}, "b"))
    engine.abort("b")
    assert not engine.step().released
    assert_empty(engine)


def test_a_producer_that_is_asked_to_fetch_computes(make: Make) -> None:
    engine = make("kv_producer")
    engine.add(from_prefill(PROMPT, 3, "a"))
    step = engine.step()
    assert not step.fetches
    assert [each.request_id for each in step.released] == ["prefilled a"]
    engine.run()
    assert engine.finished == {"a": "length"}
    assert_empty(engine)


# ---- whatever comes ---------------------------------------------------------------------------


class Walk:
    """Events in an order drawn from a seed, and the invariants after each."""

    def __init__(self, make: Make, seed: int) -> None:
        self._random = draw = random.Random(seed)
        self._num_groups = draw.choice([1, 2])
        role = draw.choice(["kv_both", "kv_both", "kv_producer", "kv_consumer"])
        policy = draw.choice(["fail", "recompute"])
        self.engine = make(
            role,
            # The smallest cache has room for one of the longest requests, but not for two.
            num_blocks=draw.choice([14, 20, 40]) * self._num_groups,
            num_groups=self._num_groups,
            policy=policy,
            require_transfer=policy == "fail" and draw.random() < 0.5,
            batch_tokens=draw.choice([BLOCK_SIZE + 3, 64, 256]),
            overlapping=draw.random() < 0.5,
            claim_within_s=draw.choice([0.0, 600.0]),
        )
        self._bases = [[draw.randrange(100) for _ in range(8 * BLOCK_SIZE)] for _ in range(3)]

    def run(self, num_events: int) -> None:
        for _ in range(num_events):
            self._event()
            self._check()

    def _event(self) -> None:
        draw, engine = self._random, self.engine
        kind = draw.random()
        if kind < 0.2 and len(engine.scheduler.requests) < 12:
            engine.add(self._request())
        elif kind < 0.27 and engine.scheduler.requests:
            engine.abort(draw.choice(sorted(engine.scheduler.requests)))
        elif kind < 0.29:
            engine.scheduler.reset_prefix_cache()
        else:
            engine.step(self._answers())

    def _request(self) -> Request:
        draw = self._random
        prompt = [*draw.choice(self._bases)[: draw.randrange(1, 8 * BLOCK_SIZE)], draw.randrange(100)]
        kind = draw.random()
        if kind < 0.25:
            return request(prompt, draw.choice([1, 1, 1, 40]), TO_PREFILL)
        if kind < 0.45:
            push = {"version": 1, "push": f"{draw.getrandbits(128):032x}"}
            return request(prompt, draw.choice([1, 1, 1, 40]), {**TO_PREFILL, "kvxfer": push})
        if kind < 0.8:
            damage = {"remote_block_ids": "?"} if draw.random() < 0.1 else {}
            return from_prefill(prompt, draw.randrange(1, 40), num_groups=self._num_groups, **damage)
        return request(prompt, draw.randrange(1, 40))

    def _answers(self) -> Answers:
        draw, engine = self._random, self.engine
        answers = Answers(sent={each for each in sorted(engine.can_be_sent) if draw.random() < 0.3})
        for request_id, order in sorted(engine.fetching.items()):
            if isinstance(order.source, Unfetchable) or draw.random() < 0.1:
                at = draw.randrange(order.first_token // BLOCK_SIZE, len(order.tables[0]))
                lost = lose(engine, request_id, at)
                answers.failed |= lost.failed
                answers.invalid_blocks |= lost.invalid_blocks
            elif draw.random() < 0.6:
                continue
            answers.received.add(request_id)
        if engine.kept and draw.random() < 0.3:
            names = frozenset({draw.choice(sorted(engine.kept))})
            answers.told_by_workers = WorkerMetadata({}, News(names, draw.choice([names, frozenset()])))
        return answers

    def _check(self) -> None:
        blocks = self.engine.pool.blocks
        for request_id, kept in self.engine.kept.items():
            if not isinstance(kept, Grant) or request_id not in self.engine.told:
                continue
            for table in self.engine.told[request_id]["remote_block_ids"]:
                assert all(blocks[each].ref_cnt for each in table if each), "what was told is freed"
        for order in self.engine.fetching.values():
            for table in order.tables:
                # A fetch writes into it, so it belongs to no other request.
                for each in table[order.first_token // BLOCK_SIZE :]:
                    assert not each or blocks[each].ref_cnt == 1, "a block is read into and shared"


@pytest.mark.parametrize("seed", range(30), indirect=True)
def test_no_block_is_lost_or_given_twice_whatever_comes(make: Make, seed: int) -> None:
    walk = Walk(make, seed)
    walk.run(400)
    assert_empty(walk.engine)
