"""Records of transfers: joined, bounded, found."""

from __future__ import annotations

import itertools

from kvxfer.control.state.transfer_counts import STAGES, TransferCounts
from kvxfer.control.state.transfer_table import (
    MOST_LOOKED_AT,
    End,
    Entry,
    Filter,
    Made,
    TransferTable,
    pack,
    transfer_id,
)
from tests.control.records import record

A, B = "a" * 32, "b" * 32
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def add(table: TransferTable, id_: str, told: End, now_s: float) -> Entry:
    entry = table.at(table.add_end(id_, told, pack(told), now_s))
    assert entry is not None
    return entry


def end(agent: str, **more: object) -> End:
    return End(agent, f"name of {agent[0]}", 0, record(**more))


def test_the_destination_says_whether_the_bytes_are_there() -> None:
    for source, destination, expected in (
        ("done", "done", "done"),
        ("failed", "done", "done"),
        ("done", "failed", "failed"),
        ("failed", None, "failed"),
        ("cancelled", "done", "done"),
        ("cancelled", "failed", "cancelled"),
        ("failed", "cancelled", "cancelled"),
        (None, "cancelled", "cancelled"),
    ):
        for order in ((0, 1), (1, 0)):
            table = TransferTable(10)
            both = [("source", source), ("destination", destination)]
            for number in order:
                role, outcome = both[number]
                if outcome is not None:
                    entry = add(table, "x", end(A, role=role, outcome=outcome), 1.0)
            assert entry.outcome == expected


def test_a_number_that_is_used_again_is_another_transfer() -> None:
    table = TransferTable(10)
    first = add(table, "x", end(A, nbytes=1), 1.0)
    second = add(table, "x", end(A, nbytes=2), 2.0)
    assert first.seq != second.seq
    assert table.get("x").seq == second.seq  # type: ignore[union-attr]
    assert table.at(first.seq).id == f"x.{first.seq}"  # type: ignore[union-attr]
    assert len({entry.id for entry in table.listed(Filter(), None, 10)[0]}) == 2


def test_the_oldest_give_way_and_leave_no_trace() -> None:
    table = TransferTable(100)
    for number in range(1000):
        add(table, f"id{number}", end(A, context=f"req-{number % 7}"), float(number))
    assert len(table) == 100
    assert table.get("id899") is None
    assert table.get("id900") is not None
    assert sum(len(table.listed(Filter(context=f"req-{n}"), None, 1000)[0]) for n in range(7)) == 100
    for number in range(100):
        add(table, f"more{number}", end(A, context=""), 2000.0)
    assert not table._by_context


def test_a_call_looks_at_a_bounded_number() -> None:
    table = TransferTable(3 * MOST_LOOKED_AT)
    first = add(table, "the one", end(A, outcome="failed"), 0.0)
    for number in range(3 * MOST_LOOKED_AT - 1):
        add(table, f"id{number}", end(A), 1.0)
    pages, cursor = [], None
    while True:
        found, cursor = table.listed(Filter(state="failed"), cursor, 10)
        pages.append([entry.seq for entry in found])
        if cursor is None:
            break
    assert pages == [[], [], [first.seq]]


MADE = Made(A, 5, "me", "token:1", "red", "req", 0, 1, 99.0)


def test_what_was_made_here_its_record_and_the_other_ends_meet_in_any_order() -> None:
    wire = transfer_id(A, B, 7)
    mine, theirs = end(A, role="destination", handle=5), end(B, role="source", ours=False, handle=0)
    for order in itertools.permutations(("made", "mine", "theirs")):
        table = TransferTable(10)
        with table.making(A):
            for step in order:
                if step == "made":
                    made = table.add_made(MADE, 1.0)
                else:
                    told = mine if step == "mine" else theirs
                    table.add_end(wire, told, pack(told), 2.0)
        assert len(table) == 1, order
        for id_ in (MADE.id, wire):
            entry = table.get(id_)
            assert entry is not None, order
            assert (entry.id, entry.made, entry.outcome) == (wire, MADE, "done")
            assert (entry.end("source"), entry.end("destination")) == (theirs, mine)
        (found,), _ = table.listed(Filter(tenant="red"), None, 10)
        assert (found.id, made.seq) == (wire, found.seq)
        for number in range(30):
            add(table, f"id{number}", end(A, context="x"), 3.0)
        assert (len(table), table._made, table._made_ids, table._seq_by_handle) == (10, {}, {}, {})
        assert table.get(wire) is table.get(MADE.id) is None


def test_a_number_of_another_session_is_not_taken_for_what_was_made_here() -> None:
    wire = transfer_id(A, B, 7)
    table = TransferTable(10)
    before = [end(A, role="destination", handle=3), end(B, role="source", ours=False, handle=0)]
    for told in before:
        add(table, wire, told, 1.0)
    with table.making(A):
        made = table.add_made(MADE, 2.0)
    now = end(A, role="destination", handle=5, nbytes=9)
    entry = add(table, wire, now, 3.0)
    assert (entry.seq, entry.made, entry.end("destination"), entry.end("source")) == (
        made.seq,
        MADE,
        now,
        None,
    )
    old = table.at(made.seq - 1)
    assert old is not None
    assert (old.id, old.made, old.end("destination"), old.end("source")) == (f"{wire}.0", None, *before)
    assert len(table) == 2


def test_of_what_was_made_here_nothing_may_be_heard() -> None:
    table = TransferTable(10)
    made = table.add_made(MADE, 1.0)
    assert (made.outcome, made.tenant) == ("pending", "red")
    table.fail(made.seq, 4.0)
    entry = table.at(made.seq)
    assert entry is not None
    assert entry.outcome == "failed"


def test_stages_are_counted_as_far_as_they_are_known() -> None:
    counts = TransferCounts()
    stages = {"posted_ns": 100, "begun_ns": 200, "first_piece_ns": 300, "ended_ns": 1300}
    counts.add(record(role="destination", ours=False, **stages, nbytes=9, context="cmpl-1"), "first", 5.0)
    failed = {"ended_ns": 2_000_000_100, "outcome": "failed", "code": "deadline"}
    counts.add(record(role="destination", ours=False, posted_ns=100, **failed), "second", 6.0)
    counts.add(record(role="expectation", ended_ns=5), "third", 7.0)
    assert {key: count for key, count in counts.ended.items() if count} == {
        ("destination", "done", ""): 1,
        ("destination", "failed", "deadline"): 1,
        ("expectation", "done", ""): 1,
    }
    assert counts.nbytes == {"source": 0, "destination": 9}
    sums = {stage: counts.stages["destination", "write", stage].sum_ns for stage in STAGES}
    assert sums == {"right": 100, "first_piece": 100, "moving": 1000, "total": 1200 + 2_000_000_000}
    total = counts.stages["destination", "write", "total"]
    assert sum(total.counts) == 2
    # Each bucket that is not empty has its newest example.
    assert [each[:3] for each in total.examples if each] == [
        ("first", "cmpl-1", 1200),
        ("second", "", 2_000_000_000),
    ]
    assert [bool(each) for each in total.examples] == [count > 0 for count in total.counts]
