"""A request's trace from the agents' reports: found by any of its names, and bounded."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxfer.cli.app import run
from kvxfer.control.state.span_table import MOST_OF_A_TRACE, EngineSpan, SpanTable
from tests.control.records import attached, record
from tests.control.serving import Served, program

TRACE = "0af7651916cd43dd8448eb211c80319c"
CONTEXT = f"cmpl-7f3a-0 00-{TRACE}-b7ad6b7169203331-01"
A, B = "a" * 32, "b" * 32


def span(trace: str, number: int = 0, *requests: str) -> EngineSpan:
    return EngineSpan(trace, f"{number:016x}", "", "span", "router", 1, 2, "", (), requests)


def test_spans_are_found_by_trace_and_request_and_the_oldest_give_way() -> None:
    table = SpanTable(capacity=10)
    for number in range(25):
        table.add([span(f"trace-{number // 2}", number, f"request-{number // 2}")])
        assert len(table) == min(number + 1, 10)
    assert [len(table.of(f"trace-{number}")) for number in range(13)] == [0] * 7 + [1] + [2] * 4 + [1]
    assert [list(table.traces_of(f"request-{number}")) for number in (6, 12)] == [[], ["trace-12"]]
    # A name is forgotten with the last span that has it.
    table = SpanTable(capacity=4)
    for number in range(20):
        table.add([span(f"t{number}", 0, "again", f"r{number}"), span(f"t{number}", 1)])
    assert list(table.traces_of("again")) == ["t18", "t19"]
    assert [bool(list(table.traces_of(f"r{number}"))) for number in range(20)] == [False] * 18 + [True] * 2
    # Spans are bounded by their size, too.
    table = SpanTable(most_nbytes=10_000)
    table.add(span(f"t{number}") for number in range(100))
    assert 5 < len(table) < 12
    # One trace cannot displace all others.
    table = SpanTable()
    table.add(span("endless", number) for number in range(2 * MOST_OF_A_TRACE))
    assert len(table) == MOST_OF_A_TRACE


@pytest.fixture
def traced(served: Served) -> Served:
    """A daemon that knows both ends of one request's transfer, and a transfer of another request."""
    stages = {"posted_ns": 1_000, "begun_ns": 3_000, "first_piece_ns": 4_000, "ended_ns": 9_000}
    for one, other, role in ((A, B, "source"), (B, A, "destination")):
        peers = [{"session": 1, "incarnation": other, "name": f"agent-{other[0]}", "rails": ["tcp"]}]
        agent = attached(one, f"agent-{one[0]}", peers=peers)
        ours = role == "destination"
        served.daemon.intake.records(agent, [record(role=role, ours=ours, context=CONTEXT, **stages)])
        served.daemon.intake.records(
            agent, [record(role=role, ours=ours, transfer=2, context="cmpl-8", **stages)]
        )
    return served


@pytest.mark.parametrize("request_", [CONTEXT, "cmpl-7f3a-0", TRACE, "7f3a-0"])
async def test_a_request_is_found_by_each_of_its_names(traced: Served, request_: str) -> None:
    async with traced.unix() as client:
        found = (await client.get("/v1/request-trace", params={"request": request_})).json()
        file = (await client.get("/v1/request-trace/perfetto", params={"request": request_})).json()
    assert found["traces"] == [TRACE]
    rows = found["rows"]
    assert {row["details"]["context"] for row in rows if row["depth"] == 0} == {CONTEXT}
    assert {(row["process"], row["name"]) for row in rows if row["depth"] == 0} == {
        ("agent-a", "sends pages to agent-b"),
        ("agent-b", "takes pages from agent-a"),
    }
    took = {row["name"]: row["took_us"] for row in rows}
    assert took["takes pages from agent-a"] == 8
    assert (took["waits for the right"], took["until the first piece"], took["pages move"]) == (2, 1, 5)
    assert [row["started_at_s"] for row in rows] == sorted(row["started_at_s"] for row in rows)
    drawn = [event for event in file["traceEvents"] if event["ph"] == "X"]
    assert sorted((event["name"], event["dur"]) for event in drawn) == sorted(
        (row["name"], row["took_us"]) for row in rows
    )
    named = {event["args"]["name"] for event in file["traceEvents"] if event["name"] == "process_name"}
    assert named == {"agent-a", "agent-b"}


async def test_spans_hide_nothing_of_a_tenant_s_and_circles_end(traced: Served) -> None:
    ring = [
        EngineSpan(TRACE, f"{n:016x}", f"{1 - n:016x}", "s", "p", 1, 2, "", (), ("7f3a-0",)) for n in (0, 1)
    ]
    traced.daemon.engine_spans.add(ring)
    token = await traced.make_token("read", tenants=[""])
    async with traced.tcp(token) as client:
        found = (await client.get("/v1/request-trace", params={"request": "7f3a-0"})).json()
    assert {row["process"] for row in found["rows"]} == {"agent-a", "agent-b"}
    async with traced.unix() as client:
        found = (await client.get("/v1/request-trace", params={"request": TRACE})).json()
    assert [row["depth"] for row in found["rows"] if row["process"] == "p"] == [0, 0]


async def test_what_is_not_known_is_said_so_and_tenants_see_their_own(traced: Served) -> None:
    token = await traced.make_token("read", tenants=["red"])
    for secret, request in ((traced.token, "cmpl-9"), (traced.token, "1"), (token, "cmpl-7f3a-0")):
        async with traced.tcp(secret) as client:
            answer = await client.get("/v1/request-trace", params={"request": request})
        assert (answer.status_code, answer.json()["code"]) == (404, "not-found")
        is_short = "a part of an id is looked for from 6 characters on" in answer.json()["detail"]
        assert is_short == (request == "1")


def test_the_command_asks_several_daemons_and_says_where_nothing_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with program(tmp_path) as daemon:
        place = f"unix:{daemon.folder}/run/api.sock"
        assert run(["trace", "cmpl-1", "--daemon", place, "--daemon", place]) == 1
        assert "request 'cmpl-1' is not known" in capsys.readouterr().err
