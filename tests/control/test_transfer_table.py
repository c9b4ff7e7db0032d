"""Records of transfers: joined, bounded, found."""

from __future__ import annotations

import random

from kvxfer.control.state.transfer_counts import STAGES, TransferCounts
from kvxfer.control.state.transfer_table import (
    MOST_LOOKED_AT,
    End,
    Entry,
    Filter,
    Made,
    Row,
    TransferTable,
    id_of,
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


def sorted_rows(table: TransferTable) -> list[Row]:
    return sorted((row for row in table._ring if row is not None), key=lambda row: row[1])


def end(agent: str, **more: object) -> End:
    return End(agent, f"name of {agent[0]}", 0, record(**more))


def test_both_ends_have_one_id_whoever_began_it() -> None:
    for began_at_a in (True, False):
        at_a = id_of(record(transfer=7, ours=began_at_a), A, B)
        at_b = id_of(record(transfer=7, ours=not began_at_a), B, A)
        assert at_a == at_b == (transfer_id(A, B, 7) if began_at_a else transfer_id(B, A, 7))
    assert transfer_id(A, B, 7) != transfer_id(B, A, 7)


def test_ends_join_in_either_order() -> None:
    for order in ((0, 1), (1, 0)):
        table = TransferTable(10)
        ends = [end(A, role="source", ours=True), end(B, role="destination", ours=False, nbytes=5)]
        for number in order:
            entry = add(table, transfer_id(A, B, 1), ends[number], 1.0)
        assert len(table) == 1
        assert entry.end("source") == ends[0]
        assert entry.end("destination") == ends[1]
        assert entry.end("expectation") is None


def test_the_destination_says_whether_the_bytes_are_there() -> None:
    for source, destination, expected in (
        ("done", "done", "done"),
        ("failed", "done", "done"),
        ("done", "failed", "failed"),
        ("failed", None, "failed"),
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


def test_pages_of_a_list_are_whole_and_disjoint(seed: int) -> None:
    draw = random.Random(seed)
    table = TransferTable(1000)
    for number in range(1500):
        add(table, f"id{number}", end(draw.choice((A, B)), outcome=draw.choice(("done", "failed"))), number)
    for wanted in (
        Filter(),
        Filter(state="failed"),
        Filter(agent=A),
        Filter(agent="name of b", since_s=1200.0),
    ):
        expected = [row[1] for row in reversed(sorted_rows(table)) if wanted(row, None)]
        found, cursor = [], None
        while True:
            some, cursor = table.listed(wanted, cursor, draw.randrange(1, 90))
            found += [entry.seq for entry in some]
            if cursor is None:
                break
        assert found == expected
        assert found


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


def test_a_request_is_found_by_its_context_and_by_its_trace() -> None:
    table = TransferTable(10)
    entry = add(table, "x", end(A, context=f"req-1 {TRACE}"), 1.0)
    add(table, "y", end(A, context="req-2"), 1.0)
    for context in (f"req-1 {TRACE}", "0af7651916cd43dd8448eb211c80319c"):
        found, cursor = table.listed(Filter(context=context), None, 10)
        assert ([each.seq for each in found], cursor) == ([entry.seq], None)
    assert table.listed(Filter(context="req-"), None, 10) == ([], None)
    assert entry.trace_parent == TRACE


def test_what_was_made_here_and_its_record_meet_in_either_order() -> None:
    made = Made(A, 1, 7, False, "me", "token:1", "red", "req", 0, 1, 99.0)
    table = TransferTable(10)
    entry = table.add_made("x", made, 1.0)
    assert (entry.outcome, entry.tenant) == ("pending", "red")
    joined = add(table, "x", end(A, role="destination"), 2.0)
    assert (joined.seq, joined.outcome, joined.made) == (entry.seq, "done", made)
    table = TransferTable(10)
    entry = add(table, "x", end(A, role="destination"), 1.0)
    joined = table.add_made("x", made, 2.0)
    assert (joined.seq, joined.outcome, joined.made) == (entry.seq, "done", made)
    # Another session's of the same number.
    assert table.add_made("x", made, 3.0).seq != entry.seq
    table.fail(joined.seq, 4.0)
    assert table.at(joined.seq).outcome == "failed"  # type: ignore[union-attr]


def test_tenants_see_their_own() -> None:
    table = TransferTable(10)
    for tenant in ("red", "blue", ""):
        table.add_made(f"id {tenant}", Made(A, 1, 7, False, "me", "k", tenant, "", 0, 1, 9.0), 1.0)
    for tenants, expected in ((None, 3), (frozenset({"red"}), 1), (frozenset({"green"}), 0)):
        assert len(table.listed(Filter(tenants=tenants), None, 10)[0]) == expected


def test_stages_are_counted_as_far_as_they_are_known() -> None:
    counts = TransferCounts()
    counts.add(
        record(role="destination", posted_ns=100, begun_ns=200, first_piece_ns=300, ended_ns=1300, nbytes=9)
    )
    counts.add(
        record(role="destination", posted_ns=100, ended_ns=2_000_000_100, outcome="failed", code="deadline")
    )
    counts.add(record(role="expectation", ended_ns=5))
    assert counts.ended == {
        ("destination", "done", ""): 1,
        ("destination", "failed", "deadline"): 1,
        ("expectation", "done", ""): 1,
    }
    assert counts.nbytes == {"destination": 9}
    sums = {stage: counts.stages["destination", stage].sum_ns for stage in STAGES}
    assert sums == {"right": 100, "first_piece": 100, "moving": 1000, "total": 1200 + 2_000_000_000}
    assert sum(counts.stages["destination", "total"].counts) == 2
