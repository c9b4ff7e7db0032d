"""What workers count, and how it adds up."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kvxfer.connectors.common.statistics import Counts, Recorder
from kvxfer.handle import Stages

MS = 1_000_000


def loaded(
    recorder: Recorder, *, load_ms: int, rails: tuple[str, ...] = ("tcp",), nbytes: int = 1000
) -> None:
    """A fetch that waited 2 ms for a session and was noticed 3 ms after its end."""
    recorder.loaded(
        "a",
        began_ns=0,
        noticed_ns=(2 + load_ms + 3) * MS,
        stages=Stages(2 * MS, 3 * MS, (2 + load_ms) * MS),
        rails=rails,
        nbytes=nbytes,
        num_pages=4,
        num_ranks=2,
    )


def taken(recorder: Recorder, num_kept: int = 0) -> Counts:
    statistics = recorder.take(num_kept)
    assert statistics is not None
    return statistics


def test_nothing_is_taken_where_nothing_happened() -> None:
    recorder = Recorder()
    assert recorder.take(0) is None
    assert Counts().is_empty()
    recorder.received()
    assert recorder.take(0) is not None
    assert recorder.take(0) is None


def test_a_change_of_what_is_kept_is_told_once_and_its_end_as_well() -> None:
    recorder = Recorder()
    assert taken(recorder, 2).data["kept"] == 2
    assert recorder.take(2) is None
    assert taken(recorder, 0).data["kept"] == 0


def test_a_fetch_is_told_apart_into_connecting_loading_and_noticing() -> None:
    recorder = Recorder()
    loaded(recorder, load_ms=10)
    data = taken(recorder).data
    assert (data["connect_s"], data["load_s"], data["notice_s"]) == ([0.002], [0.01], [0.003])
    assert (data["nbytes"], data["num_pages"], data["rails"]) == ([1000], [4], {"tcp": 1})


def test_a_fetch_of_nothing_took_no_time_to_load() -> None:
    recorder = Recorder()
    recorder.loaded(
        "a",
        began_ns=0,
        noticed_ns=5 * MS,
        stages=Stages(0, 0, 0),
        rails=[],
        nbytes=0,
        num_pages=0,
        num_ranks=1,
    )
    data = taken(recorder).data
    assert (data["connect_s"], data["load_s"], data["notice_s"]) == ([0.005], [0.0], [0.0])
    assert taken_line(data) == {"loads": 1}


def taken_line(data: dict[str, Any]) -> dict[str, Any]:
    """The log line's entries that are not 0 or times."""
    line = Counts(data).reduce()
    return {name: value for name, value in line.items() if value and "ms" not in name}


def test_workers_and_intervals_add_up() -> None:
    first, second = Recorder(), Recorder()
    loaded(first, load_ms=10)
    first.failed("lease-ended")
    loaded(second, load_ms=30, rails=("shm", "tcp"))
    second.failed("lease-ended")
    second.failed("peer-lost")
    second.expired()
    both = taken(first, 3)
    both.add(taken(second, 4).data)
    assert both.data["load_s"] == [0.01, 0.03]
    assert both.data["rails"] == {"tcp": 2, "shm": 1}
    assert both.data["failures"] == {"lease-ended": 2, "peer-lost": 1}
    assert (both.data["receipts"], both.data["expired"], both.data["kept"]) == (0, 1, 4)
    # Who says nothing of what is kept does not take it back.
    loaded(first, load_ms=1)
    both.add(taken(first, 3).data)
    assert both.data["kept"] == 4


def test_each_fetch_can_be_followed_by_its_request(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    loaded(recorder, load_ms=10)
    assert not caplog.messages
    with caplog.at_level(logging.DEBUG, "kvxfer"):
        loaded(recorder, load_ms=10, rails=("shm",))
    assert caplog.messages == [
        "kvxfer: request a: loaded 1000 bytes in 4 pages from 2 ranks over shm in 10.0 ms, after 2.0 ms of "
        "connecting; noticed 3.0 ms later"
    ]
