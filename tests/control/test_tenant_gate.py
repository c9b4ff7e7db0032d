"""Rates of tenants: a request waits for its turn, and keeps its deadline."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvxfer.control.problems import Refusal
from kvxfer.control.state.byte_rates import BURST_S, ByteRates
from kvxfer.control.tenant_gate import TenantGate


def test_a_bucket_gives_its_burst_and_then_its_rate(seed: int) -> None:
    draw = random.Random(seed)
    rates = ByteRates()
    rates.set({"red": 1000.0})
    now_s, went, largest = 0.0, 0, 0
    for _ in range(10_000):
        now_s += draw.random() / 50
        if not rates.wait_s("red", now_s):
            nbytes = draw.randrange(1, 200)
            rates.spend("red", nbytes, now_s)
            went, largest = went + nbytes, max(largest, nbytes)
    assert 1000 * now_s * 0.9 <= went <= 1000 * (now_s + BURST_S) + largest
    assert not rates.wait_s("blue", now_s), "others have no limit"


def test_one_request_overdraws_and_the_next_waits_for_it() -> None:
    rates = ByteRates()
    rates.set({"red": 10.0})
    rates.spend("red", 1000, 0.0)
    assert rates.wait_s("red", 0.0) == pytest.approx(100.0 - BURST_S)
    rates.set({"red": 10.0, "blue": 1.0})
    assert rates.wait_s("red", 50.0) == pytest.approx(50.0 - BURST_S), "the same rate forgives nothing"
    rates.set({"red": 20.0})
    assert not rates.wait_s("red", 50.0)


async def entered(gate: TenantGate, order: list[int], number: int) -> None:
    await gate.enter("red", 1, 600.0)
    order.append(number)


async def test_requests_of_a_tenant_go_in_their_order_and_others_at_once() -> None:
    gate = TenantGate()
    gate.set_rates({"red": 1})
    assert await gate.enter("red", 300, 5.0) <= 5.0
    order: list[int] = []
    waiting = [asyncio.create_task(entered(gate, order, number)) for number in range(5)]
    assert await gate.enter("blue", 10**9, 5.0) == 5.0
    await asyncio.sleep(0.05)  # none goes
    assert not order
    # A cancelled request leaves the others' order unchanged; without a limit, requests go at once.
    waiting[1].cancel()
    gate.set_rates({})
    await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 60)
    assert order == [0, 2, 3, 4]


async def test_what_has_no_turn_in_time_is_refused_in_words_that_say_when() -> None:
    gate = TenantGate()
    gate.set_rates({"red": 10})
    await gate.enter("red", 1000, 5.0)
    with pytest.raises(Refusal, match="'red' is limited to 10 bytes a second") as caught:
        await gate.enter("red", 1, 5.0)
    assert caught.value.code == "rate-limited"
    assert caught.value.retry_after_s is not None
    assert 5 < caught.value.retry_after_s <= 99
    # A request behind a waiting one ends by its own deadline.
    first = asyncio.create_task(gate.enter("red", 1, 600.0))
    await asyncio.sleep(0)
    with pytest.raises(Refusal) as caught:
        await gate.enter("red", 1, 0.05)
    assert caught.value.code == "deadline"
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
