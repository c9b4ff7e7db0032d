"""What callers share: rates and turns, and a bound on what each makes the daemon keep."""

from __future__ import annotations

import asyncio
import gc
import random

import pytest

from kvxfer.control.schema.problems import Refusal
from kvxfer.control.state.byte_rates import BURST_S, ByteRates
from kvxfer.control.state.event_log import _MOST_ENCODED, EventLog, Wanted
from kvxfer.control.state.lease_counts import LeaseCounts
from kvxfer.control.state.rates import OpenCounts, Rates
from kvxfer.control.transfers.tenant_gate import TenantGate


def test_bytes_have_a_burst_and_then_a_rate(seed: int) -> None:
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
    rates.spend("red", 10**6, now_s)
    wait_s = rates.wait_s("red", now_s)
    rates.set({"red": 1000.0, "blue": 1.0})
    assert rates.wait_s("red", now_s) == wait_s > 900, "the same rate forgives nothing"


async def test_what_has_no_turn_in_time_is_refused() -> None:
    gate = TenantGate()
    gate.set_rates({"red": 10, "green": 10})
    assert await gate.enter("red", 1000, 60.0) <= 60.0, "one may overdraw"
    assert await gate.enter("blue", 10**9, 5.0) == 5.0, "others go at once"
    first = asyncio.create_task(gate.enter("red", 1, 600.0))
    await asyncio.sleep(0)
    with pytest.raises(Refusal, match="'red' is limited to 10 bytes a second") as behind:
        await gate.enter("red", 1, 0.05)  # its own deadline, and not that of the one before it
    assert (behind.value.code, first.done()) == ("deadline", False)
    first.cancel()
    await asyncio.wait([first])
    gate.spend("green", 1000)  # what was not known before
    for tenant in ("red", "green"):
        with pytest.raises(Refusal, match=f"'{tenant}' is limited to 10 bytes a second") as alone:
            await gate.enter(tenant, 1, 1.0)
        assert (alone.value.code, (alone.value.retry_after_s or 0.0) > 1.0) == ("rate-limited", True)


async def test_requests_of_a_tenant_go_in_their_order() -> None:
    gate = TenantGate()
    gate.set_rates({"red": 1})
    await gate.enter("red", 300, 5.0)
    order: list[int] = []

    async def enter(number: int) -> None:
        await gate.enter("red", 1, 600.0)
        order.append(number)

    waiting = [asyncio.create_task(enter(number)) for number in range(5)]
    await asyncio.sleep(0)
    # A cancelled request leaves the others' order unchanged; without a limit, requests go at once.
    waiting[1].cancel()
    gate.set_rates({})
    await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 60)
    assert order == [0, 2, 3, 4]


def test_what_callers_come_and_go_with_is_bounded() -> None:
    rates, leases, log = Rates(rate=1.0, burst=1.0), LeaseCounts(), EventLog()
    for number in range(5000):
        rates.take(f"k{number}", 0.0)
        leases.take(f"{number:032x}", {})
    assert len(rates._levels) == len(leases._reported) == 4096
    for number in range(3 * _MOST_ENCODED):
        log.append("a", 1.0, {"number": number})
    for event in log.read(0, Wanted(), 3 * _MOST_ENCODED).events:
        event.encoded()
    assert len(log._encoded) == _MOST_ENCODED
    # Each caller has a bound, and all together.
    counts = OpenCounts(2, 3)
    assert [counts.enter(key) for key in "aaabbc"] == [True, True, False, True, False, False]
    for key in "aab":
        counts.leave(key)
    assert (counts.total, counts._counts) == (0, {})


def test_the_collector_looks_at_no_event() -> None:
    log = EventLog()
    for number in range(10):
        log.append("a", 1.0, {"number": number})
    log.append_packed("a", 1.0, ("id", ("agent", 1, b"record")))
    for _ in range(2):  # in nested tuples it sees the inner one first
        gc.collect()
    assert not any(gc.is_tracked(row) for row in log._ring)
