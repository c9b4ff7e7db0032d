"""Rate limits of each caller."""

from __future__ import annotations

import random

from kvxfer.control.state.rates import OpenCounts, Rates


def test_a_bucket_gives_its_burst_and_then_its_rate(seed: int) -> None:
    draw = random.Random(seed)
    rates = Rates(rate=10.0, burst=5.0)
    now, taken = 0.0, 0
    for _ in range(10_000):
        now += draw.random() / 50
        wait_s = rates.take("a", now)
        taken += not wait_s
        assert wait_s <= 0.1 + 1e-9
    assert 10 * now - 1 <= taken <= 10 * now + 6
    assert rates.take("b", now) == 0, "others have their own"


def test_who_comes_back_in_time_is_let_in() -> None:
    rates = Rates(rate=2.0, burst=1.0)
    assert rates.take("a", 0.0) == 0
    wait_s = rates.take("a", 0.1)
    assert rates.take("a", 0.1 + wait_s + 1e-9) == 0


def test_callers_are_forgotten_in_the_end() -> None:
    rates = Rates(rate=1.0, burst=1.0)
    for number in range(10_000):
        rates.take(f"k{number}", 0.0)
    assert len(rates._levels) == 4096


def test_counts_have_two_bounds_and_leave_nothing() -> None:
    counts = OpenCounts(2, 3)
    assert [counts.enter(key) for key in "aaabbc"] == [True, True, False, True, False, False]
    for key in "aab":
        counts.leave(key)
    assert (counts.total, counts._counts) == (0, {})
