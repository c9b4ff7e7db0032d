"""Prompts that prefill keeps for a decode that fetches them late, or never."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from kvxfer import LeaseToken
from kvxfer.connectors.common.handover import Handover
from kvxfer.connectors.common.step import Claimed, FetchOrder, Grant, News, Step, Unfetchable
from tests.connectors.workers import (
    BLOCK_SIZE,
    NUM_LAYERS,
    Clock,
    Pushed,
    Worker,
    collected,
    forward,
    require_received,
    some_tokens,
    workers,
)
from tests.waiting import until

TOKENS, LEASE_TTL_S = 100, 30.0
SRC, DST = (5, 9, 2, 7), (7, 3, 11, 1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def handed_over(prefill: list[Worker], keep_s: float | None = LEASE_TTL_S) -> Handover:
    """A request that prefill has computed, and that has finished there."""
    lease = LeaseToken.draw()
    for worker in prefill:
        worker.half.step(Step(grants=[Grant("a", (lease,), (SRC,))]))
        assert not worker.half.collect({"a"}).sent
    ranks = tuple(worker.rank for worker in prefill)
    return Handover("a", ranks, (lease,), (SRC,), (BLOCK_SIZE,), (1,), TOKENS, keep_s=keep_s)


def fetched(handover: Handover) -> Step:
    return Step(fetches=[FetchOrder("b", handover, (DST,), 0, TOKENS)], unclaimed=["b"])


def hear_of_it(prefill: list[Worker], decode: list[Worker]) -> None:
    """Steps both until every worker of prefill has received the claim of the request."""
    heard = [News() for _ in prefill]

    def all_have() -> bool:
        for worker in decode:
            worker.half.collect(set())
        for at, worker in enumerate(prefill):
            assert not worker.half.collect(set()).sent
            heard[at] |= worker.half.take_news() or News()
        return all(news.claimed for news in heard)

    until(all_have, "a claim at every rank")
    assert set(heard) == {News(frozenset({"a"}))}


def test_a_request_that_waits_at_decode_for_six_lease_times_loads(clock: Clock) -> None:
    with workers("prefill", 2, lease_ttl_s=LEASE_TTL_S) as prefill, workers("decode") as decode:
        handover = handed_over(prefill)
        decode[0].half.step(Step(claimed=[Claimed("b", handover)]))
        hear_of_it(prefill, decode)
        for _ in range(6 * 3):
            clock.now += LEASE_TTL_S / 3
            hear_of_it(prefill, decode)
        decode[0].half.step(fetched(handover))
        require_received(decode, {"b"})
        for result in collected(prefill):
            assert result.sent == {"a"}


def test_one_that_is_claimed_no_more_is_kept_for_one_lease_time(clock: Clock) -> None:
    with workers("prefill", lease_ttl_s=LEASE_TTL_S) as prefill, workers("decode") as decode:
        decode[0].half.step(Step(claimed=[Claimed("b", handed_over(prefill))]))
        hear_of_it(prefill, decode)
        clock.now += LEASE_TTL_S * 0.9
        hear_of_it(prefill, decode)
        decode[0].half.step(Step(unclaimed=["b"]))
        clock.now += LEASE_TTL_S * 0.9
        assert not decode[0].half.collect(set()).received
        assert not prefill[0].half.collect(set()).sent
        clock.now += LEASE_TTL_S * 0.2
        assert prefill[0].half.collect(set()).sent == {"a"}


def test_of_several_workers_one_speaks_for_the_engine(clock: Clock) -> None:
    with workers("prefill") as prefill, workers("decode", 2) as decode:
        step = Step(claimed=[Claimed("b", handed_over(prefill))])
        for worker in decode:
            worker.half.step(step)
        assert [len(worker.half._heartbeats) for worker in decode] == [1, 0]


def test_an_engine_that_does_not_listen_is_told_nothing() -> None:
    with workers("prefill") as prefill, workers("decode") as decode:
        decode[0].half.step(Step(claimed=[Claimed("b", handed_over(prefill, keep_s=None))]))
        assert not decode[0].half._heartbeats


def test_one_that_is_read_comes_back_soon() -> None:
    with workers("prefill") as prefill, workers("decode") as decode:
        handover = handed_over(prefill)
        decode[0].half.step(fetched(handover))
        (result,) = collected(decode)
        assert not result.failed
        heard = News()

        def has_heard() -> bool:
            nonlocal heard
            prefill[0].half.collect(set())
            heard |= prefill[0].half.take_news() or News()
            return bool(heard.returning)

        until(has_heard, "word of a read")
        assert heard == News(frozenset({"a"}), frozenset({"a"}))


def test_one_that_gave_way_is_not_read_any_more() -> None:
    with workers("prefill") as prefill, workers("decode") as decode:
        handover = handed_over(prefill)
        prefill[0].half.before_forward(Step(given_way=["a"]))
        assert prefill[0].half.collect(set()).sent == {"a"}
        decode[0].half.step(fetched(handover))
        (result,) = collected(decode)
        assert result.failed == {"b": set(DST)}
        statistics = prefill[0].half.take_statistics()
        assert statistics is not None
        assert (statistics.data["gave_way"], statistics.data["expired"]) == (1, 0)


# ---- pushes -----------------------------------------------------------------------------------


def ask_for(pushed: Pushed, prefill: list[Worker]) -> Step:
    source = pushed.order(prefill).fetches[0].source
    assert not isinstance(source, Unfetchable)
    return Step(claimed=[Claimed("b", source)])


@pytest.mark.parametrize("is_first", ["decode", "prefill"])
def test_a_push_whose_decode_waits_for_its_turn_is_kept(clock: Clock, is_first: str) -> None:
    pushed, whole = Pushed.draw("a", TOKENS), some_tokens(TOKENS)
    with (
        workers("prefill", lease_ttl_s=LEASE_TTL_S) as prefill,
        workers("decode", lease_ttl_s=LEASE_TTL_S) as decode,
    ):
        if is_first == "decode":
            decode[0].half.step(ask_for(pushed, prefill))
            until(partial(is_expected, prefill, decode), "a claim of what prefill does not know yet")
        forward(prefill, pushed, 0, TOKENS, whole)
        assert not prefill[0].half.collect({"a"}).sent
        if is_first == "prefill":
            decode[0].half.step(ask_for(pushed, prefill))
        hear_of_it(prefill, decode)
        for _ in range(6 * 3):
            clock.now += LEASE_TTL_S / 3
            hear_of_it(prefill, decode)
        order = pushed.order(prefill)
        order.unclaimed = ["b"]
        decode[0].half.step(order)
        until(
            lambda: bool(prefill[0].half.collect(set())) and decode[0].half.collect(set()).received == {"a"},
            "the push",
        )
        assert all(np.array_equal(pushed.arrived(decode, layer), whole[layer]) for layer in range(NUM_LAYERS))


def is_expected(prefill: list[Worker], decode: list[Worker]) -> bool:
    """Whether prefill has received a claim of a push that it has not begun."""
    assert not decode[0].half.collect(set()).received
    assert not prefill[0].half.collect(set()).sent
    assert prefill[0].half._pushes is not None
    return bool(prefill[0].half._pushes._claimed)


def test_a_push_that_gave_way_tells_who_comes_late() -> None:
    pushed, whole = Pushed.draw("a", TOKENS), some_tokens(TOKENS)
    with workers("prefill", lease_ttl_s=600.0) as prefill, workers("decode") as decode:
        forward(prefill, pushed, 0, TOKENS, whole)
        assert not prefill[0].half.collect({"a"}).sent
        prefill[0].half.before_forward(Step(given_way=["a"]))
        assert prefill[0].half.collect(set()).sent == {"a"}
        decode[0].half.step(pushed.order(prefill))
        until(
            lambda: bool(prefill[0].half.collect(set())) and bool(decode[0].half.collect(set()).failed),
            "refusal",
        )
        assert not any(cache.any() for cache in decode[0].caches.values())
