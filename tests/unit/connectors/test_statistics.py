"""What workers count, and how it adds up."""

from __future__ import annotations

import logging

import pytest

from kvxfer.connectors.common.statistics import PULL, PUSH, Counts, Recorder
from kvxfer.handle import Stages

MS = 1_000_000


def loaded(
    recorder: Recorder,
    *,
    load_ms: int,
    rails: tuple[str, ...] = ("tcp",),
    nbytes: int = 1000,
    mode: str = PULL,
) -> None:
    """A fetch that waited 2 ms for a session and was noticed 3 ms after its end."""
    recorder.loaded(
        "a",
        mode,
        began_ns=0,
        noticed_ns=(2 + load_ms + 3) * MS,
        stages=Stages(2 * MS, 3 * MS, (2 + load_ms) * MS),
        rails=rails,
        nbytes=nbytes,
        num_pages=4,
        num_ranks=2,
    )


def taken(recorder: Recorder) -> Counts:
    statistics = recorder.take()
    assert statistics is not None
    return statistics


def test_a_change_of_what_is_kept_is_told_once_and_its_end_as_well() -> None:
    recorder = Recorder()
    for number in (2, 0):
        recorder.keeps(number)
        recorder.keeps(number)
        assert taken(recorder).data["kept"] == number
        recorder.keeps(number)
        assert recorder.take() is None


def test_a_fetch_is_told_apart_into_connecting_loading_and_noticing() -> None:
    recorder = Recorder()
    loaded(recorder, load_ms=10)
    data = taken(recorder).data
    stages = [data[name][PULL] for name in ("connect_s", "load_s", "notice_s")]
    assert stages == [[0.002], [0.01], [0.003]]
    assert [data[name][PULL] for name in ("nbytes", "num_pages", "rails")] == [[1000], [4], {"tcp": 1}]


def test_workers_and_intervals_add_up() -> None:
    first, second = Recorder(), Recorder()
    loaded(first, load_ms=10)
    first.failed(PULL, "lease-ended")
    loaded(second, load_ms=30, rails=("shm", "tcp"))
    loaded(second, load_ms=500, rails=("shm",), mode=PUSH)
    second.failed(PULL, "lease-ended")
    second.failed(PUSH, "peer-lost")
    second.expired()
    both = taken(first)
    both.add(taken(second).data)
    assert both.data["load_s"] == {PULL: [0.01, 0.03], PUSH: [0.5]}
    assert both.data["rails"] == {PULL: {"tcp": 2, "shm": 1}, PUSH: {"shm": 1}}
    assert both.data["failures"] == {PULL: {"lease-ended": 2}, PUSH: {"peer-lost": 1}}
    assert (both.data["receipts"], both.data["expired"]) == (0, 1)
    # Decode waits for a push while prefill computes, so the time does not count as a pull's and has no rate.
    line = both.reduce()
    assert (line["pull load ms (p90)"], line["push load ms (p90)"]) == (30.0, 500.0)
    assert "push MB/s of a load" not in line


def test_what_is_kept_is_the_last_that_was_told_and_no_sum() -> None:
    scheduler, worker = Recorder(), Recorder()
    scheduler.keeps(3)
    counts = taken(scheduler)
    worker.received()
    counts.add(taken(worker).data)  # workers say nothing of it, and do not take it back
    assert counts.data["kept"] == 3
    scheduler.keeps(2)
    counts.add(taken(scheduler).data)
    assert counts.data["kept"] == 2


def test_each_fetch_can_be_followed_by_its_request(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    loaded(recorder, load_ms=10)
    assert not caplog.messages
    with caplog.at_level(logging.DEBUG, "kvxfer"):
        loaded(recorder, load_ms=10, rails=("shm",))
    assert caplog.messages == [
        "kvxfer: request a: loaded (pull) 1000 bytes in 4 pages from 2 ranks over shm in 10.0 ms, after "
        "2.0 ms of connecting; noticed 3.0 ms later"
    ]
