"""Estimates of the next transfer's and step's time, from the last ones."""

from __future__ import annotations

import math

from kvxfer.connectors.common.pace import Pace, StepPace


def test_fewer_bytes_take_as_long_and_more_take_longer() -> None:
    pace = Pace()
    pace.took("a", 1000, 0.001)
    assert pace.expected_s("a", 10) == 0.001
    assert pace.expected_s("a", 4000) == 0.004


def test_one_that_stood_still_changes_nothing_and_a_slower_path_does() -> None:
    pace = Pace()
    for seconds in (0.001, 0.001, 5.0):
        pace.took("a", 1000, seconds)
    assert pace.expected_s("a", 1000) == 0.001
    for _ in range(8):
        pace.took("a", 1000, 0.5)
    assert pace.expected_s("a", 1000) == 0.5


def test_a_failure_is_forgotten_with_all_before_it() -> None:
    pace = Pace()
    pace.took("a", 1000, 0.001)
    pace.forget("a")
    pace.forget("b")
    assert pace.expected_s("a", 1000) == math.inf
    pace.took("a", 1000, 0.002)
    assert pace.expected_s("a", 1000) == 0.002


def test_engines_that_came_and_went_are_not_remembered_for_ever() -> None:
    pace = Pace()
    for engine in range(1025):
        pace.took(str(engine), 1, 1.0)
    assert pace.expected_s("0", 1) == math.inf
    assert pace.expected_s("1", 1) == 1.0


def stepping(step_s: float) -> StepPace:
    """An engine that slept once between its steps."""
    steps = StepPace()
    for at in (0.0, 1.0, 2.0, 50.0, 51.0):
        steps.ended(at * step_s, num_running=4)
    return steps


def test_waiting_is_worth_what_one_request_wins_by_it() -> None:
    steps = stepping(0.125)
    assert steps.worth([0.1], 1, 1.0) == (1, 0.125)
    assert steps.worth([0.1], 0, 1.0) == (1, 0.125)
    assert steps.worth([0.1], 2, 1.0) == (0, 0.0)
    assert steps.worth([0.01], 8, 1.0) == (1, 0.015625)
    assert steps.worth([], 8, 1.0) == (0, 0.0)
    assert steps.worth([math.inf], 0, 1.0) == (0, 0.0)


def test_nobody_waits_longer_than_was_said() -> None:
    steps = stepping(0.125)
    assert steps.worth([0.01], 1, 0.05) == (1, 0.05)
    assert steps.worth([0.1], 1, 0.05) == (0, 0.0)
    assert steps.worth([0.01], 1, 0.0) == (0, 0.0)


def test_an_engine_that_slept_has_no_longer_steps() -> None:
    steps = StepPace()
    for at in (0.0, 0.125):
        steps.ended(at, num_running=1)
    for nap in range(1, 20):
        steps.ended(100.0 * nap, num_running=0)
        steps.ended(100.0 * nap + 50, num_running=1)
    assert steps.worth([0.1], 1, 60.0) == (1, 0.125)
