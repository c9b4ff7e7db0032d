"""Requests that name no cache: how often the log says so, and which requests are forgotten."""

from __future__ import annotations

import logging

import pytest

from kvxfer.connectors.common.cache_group import CacheGroup
from kvxfer.connectors.common.settings import Settings
from kvxfer.connectors.common.statistics import Recorder
from kvxfer.connectors.common.untransferred import Untransferred
from tests.connectors.requests import Request


def test_it_is_said_once_in_a_minute_of_how_many(caplog: pytest.LogCaptureFixture) -> None:
    statistics, clock = Recorder(), [0.0]
    group = CacheGroup(0, "kv.0", ("layer",), 16)
    them = Untransferred([group], Settings(), statistics, lambda: clock[0])
    with caplog.at_level(logging.WARNING, "kvxfer"):
        for number, at_s in enumerate((0, 1, 59, 60, 200)):
            clock[0] = at_s
            request = Request([7] * 40, str(number))
            them.arrived(request)
            for _ in range(3):  # it waits for room
                them.asked(request, 16)
            assert not them.refusal(request.id)
            them.ended(request.id)
    told = [record.args for record in caplog.records]
    assert told == [("0", 24, 1), ("3", 24, 3), ("4", 24, 1)]
    counts = statistics.take()
    assert counts is not None
    assert counts.data["untransferred"] == 5


def test_nothing_is_left_of_requests_that_have_ended() -> None:
    groups = [CacheGroup(at, f"kv.{at}", ("layer",), size) for at, size in enumerate((16, 64))]
    groups.append(CacheGroup(2, "states", ("layer",), 1 << 20, is_state=True))
    them = Untransferred(groups, Settings(require_transfer=True), Recorder())
    refused = {}
    for num_tokens in (64, 65):
        request = Request([7] * num_tokens, str(num_tokens))
        them.arrived(request)
        them.asked(request, 0)
        refused[num_tokens] = bool(them.refusal(request.id))
        them.ended(request.id)
        assert not them.refusal(request.id)
    assert refused == {64: False, 65: True}  # blocks of the larger group
    unseen = Request([7] * 65, "unseen")
    them.arrived(unseen)
    them.ended("unseen")
    them.asked(unseen, 0)
    assert not them.refusal("unseen")
