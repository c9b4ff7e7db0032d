"""Events by index: what watchers see, what they miss, and what they cost."""

from __future__ import annotations

import gc
import json
import random

from kvxfer.control.state.event_log import _MOST_ENCODED, EventLog, Wanted

ALL = Wanted()


def fill(log: EventLog, count: int, topic: str = "transfers.done", tenant: str | None = None) -> None:
    for number in range(count):
        log.append(topic, 1.0, {"number": number}, tenant)


def read_all(log: EventLog, after: int, wanted: Wanted = ALL, most: int = 7) -> tuple[list[int], int]:
    """Returns the indexes of all wanted events, and how many were missed."""
    found: list[int] = []
    missed = 0
    while after < log.last:
        batch = log.read(after, wanted, most)
        assert batch.after > after
        assert len(batch.events) <= most
        found += [event.index for event in batch.events]
        missed += batch.missed
        after = batch.after
    return found, missed


def test_every_event_is_read_once_or_missed() -> None:
    for count in (0, 1, 9, 10, 11, 25):
        log = EventLog(capacity=10)
        fill(log, count)
        found, missed = read_all(log, 0)
        assert found == list(range(max(1, count - 9), count + 1))
        assert missed == max(0, count - 10)


def test_reading_beside_writing_in_any_order(seed: int) -> None:
    draw = random.Random(seed)
    log = EventLog(first=100, capacity=50)
    after, seen, missed = 99, 0, 0
    for _ in range(500):
        fill(log, draw.randrange(40))
        if draw.random() < 0.5:
            batch = log.read(after, ALL, draw.randrange(1, 60))
            seen, missed, after = seen + len(batch.events), missed + batch.missed, batch.after
    found, lost = read_all(log, after)
    assert seen + missed + len(found) + lost == log.last - 99


def test_topics_are_wanted_with_those_below_them() -> None:
    log = EventLog()
    for topic in ("transfers.done", "transfers.failed", "transfersX", "drain.begun", "drain"):
        fill(log, 1, topic)
    for topics, expected in (
        ((), [1, 2, 3, 4, 5]),
        (("transfers",), [1, 2]),
        (("transfers.*",), [1, 2]),
        (("transfers.failed", "drain"), [2, 4, 5]),
        (("nothing",), []),
    ):
        assert read_all(log, 0, Wanted(topics))[0] == expected


def test_a_tenants_watcher_sees_its_own_and_the_nodes_drain() -> None:
    log = EventLog()
    for tenant in (None, "red", "blue", ""):
        fill(log, 1, "pages.parked", tenant)
    fill(log, 1, "drain.begun", None)
    assert read_all(log, 0, Wanted((), frozenset({"red"})))[0] == [2, 5]
    assert read_all(log, 0, Wanted((), None))[0] == [1, 2, 3, 4, 5]


def test_an_index_from_elsewhere_is_taken_for_the_newest() -> None:
    log = EventLog()
    fill(log, 3)
    assert log.read(10**12, ALL) == ((), 3, 0)


def test_what_a_daemons_life_before_gave_out_is_missed() -> None:
    log = EventLog(first=1_000_001)
    fill(log, 2)
    batch = log.read(5, ALL)
    assert [event.index for event in batch.events] == [1_000_001, 1_000_002]
    assert batch.missed == 1_000_001 - 5 - 1


def test_an_event_is_made_once_when_it_is_wanted() -> None:
    made: list[int] = []

    def make(data: int) -> dict[str, int]:
        made.append(data)
        return {"x": data}

    log = EventLog(make=make)
    log.append_packed("a", 1.0, 1)
    assert not made
    first, again = log.read(0, ALL), log.read(0, ALL)
    texts = {event.encoded() for event in (*first.events, *again.events)}
    assert made == [1]
    (text,) = texts
    lines = text.decode().split("\n")
    assert lines[:2] == ["id: 1", "event: a"]
    assert json.loads(lines[2].removeprefix("data: ")) == {
        "index": 1,
        "topic": "a",
        "at_s": 1.0,
        "data": {"x": 1},
    }


def test_who_waits_is_called_once() -> None:
    log = EventLog()
    calls: list[str] = []

    def waker() -> None:
        calls.append("woken")

    log.on_next(waker)
    log.on_next(waker)
    fill(log, 3)
    log.wake()
    log.wake()
    assert calls == ["woken"]
    log.on_next(waker)
    log.forget(waker)
    log.wake()
    assert calls == ["woken"]


def test_the_collector_looks_at_no_event() -> None:
    log = EventLog()
    fill(log, 10)
    log.append_packed("a", 1.0, ("id", ("agent", 1, b"record")))
    for _ in range(2):  # in nested tuples it sees the inner one first
        gc.collect()
    assert not any(gc.is_tracked(row) for row in log._ring)


def test_what_is_kept_for_watchers_is_bounded() -> None:
    log = EventLog()
    fill(log, 3 * _MOST_ENCODED)
    for event in log.read(0, ALL, 3 * _MOST_ENCODED).events:
        event.encoded()
    assert len(log._encoded) == _MOST_ENCODED
