"""The daemon's log: lines for programs, and one line for a lost peer."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from kvxfer.control.agents.arrival_log import MOST_LINES, ArrivalLog
from kvxfer.control.state.transfer_table import End
from kvxfer.control.transfers.failure_log import FailureLog
from kvxfer.errors import PeerError
from kvxfer.log_lines import JsonLines, PlainLines
from tests.control.records import attached, record
from tests.control.serving import program
from tests.fault.node import Node, Worker
from tests.waiting import until


def test_a_line_is_one_object_with_what_an_error_knows() -> None:
    error = PeerError("prefill-0\nwas lost", code="peer-lost", peer="prefill-0", context="cmpl-1")
    line = logging.LogRecord("kvxfer", logging.WARNING, "x.py", 1, "a %s: %s", ("b", error), None)
    line.fields = {"transfers": 3}
    text = JsonLines().format(line)
    assert "\n" not in text
    told = json.loads(text)
    assert told.pop("time").endswith("+00:00")
    del told["pid"]
    assert told == {
        "level": "warning",
        "logger": "kvxfer",
        "message": f"a b: {error}",
        "code": "peer-lost",
        "peer": "prefill-0",
        "context": "cmpl-1",
        "transfers": 3,
    }


def test_what_a_peer_calls_itself_begins_no_line() -> None:
    line = logging.LogRecord(
        "kvxfer", logging.WARNING, "x.py", 1, "lost %s", ("a\n2026 INFO b\x1b[2J",), None
    )
    assert PlainLines().format(line).endswith(" WARNING lost a\\n2026 INFO b\\x1b[2J")


async def test_a_transfer_counts_once_and_a_pair_is_told_of_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = FailureLog()
    for minute in range(3):
        for number in range(10):
            for name, peer in (("prefill", "decode"), ("decode", "prefill")):
                failed = record(outcome="failed", code="deadline", message="too slow")
                failures.add(
                    f"t{minute}-{number}", End("a" * 32, name, 0, failed, ("kv", "b" * 32, peer, "kv"))
                )
        failures.add("t", End("a" * 32, "prefill", 0, record(), ("kv", "b" * 32, "decode", "kv")))
        failures.tell()
    assert caplog.messages == ["10 transfers of prefill with decode failed [deadline]: too slow"]
    failures.close()
    assert caplog.messages[1:] == ["20 transfers of prefill with decode failed [deadline]: too slow"]


async def test_agents_that_attach_and_go_are_told_of_and_hundreds_share_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvxfer")
    arrivals = ArrivalLog()
    agents = [attached(f"{number:032x}", f"decode-{number}", pid=number) for number in range(200)]
    for _ in range(2):
        for agent in agents:
            arrivals.attached(agent)
        for agent in agents[:50]:
            arrivals.gone(agent)
        arrivals.tell()
        assert len(caplog.messages) == MOST_LINES + 1
        assert caplog.messages[0] == "agent decode-0 attached, from process 0 with kvxfer 0"
        more = 200 - MOST_LINES
        assert caplog.messages[-1] == f"further agents within 10 s: {more} attached, 50 are gone"
        caplog.clear()
    arrivals.gone(agents[7])
    (line,) = caplog.records
    assert line.getMessage() == "agent decode-7 of process 7 is gone"
    told = json.loads(JsonLines().format(line))
    assert (told["agent"], told["agent_id"], told["agent_pid"]) == ("decode-7", f"{7:032x}", 7)
    arrivals.close()
    arrivals.gone(agents[8])
    assert caplog.records == [line], "agents that go because the daemon ends are not lost"


def test_every_line_of_the_plain_log_has_its_time_and_the_start_is_there_at_any_level(tmp_path: Path) -> None:
    for _ in range(2):
        with program(tmp_path) as daemon:
            with daemon.client() as client:
                assert client.patch("/v1/settings", json={"log_level": "error"}).status_code == 200
            assert daemon.end() == 0
        assert len(daemon.said) >= 3
        for line in daemon.said:
            assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO \w", line), line
    assert daemon.said[-1].endswith(" INFO ready")


def test_a_killed_engine_is_a_line_of_its_own_daemon(tmp_path: Path) -> None:
    with program(tmp_path) as daemon:
        victim = Worker("prefill", "shm", daemon=str(daemon.folder / "run"))
        try:
            until(lambda: any("agent prefill attached" in line for line in daemon.said), "no line")
            victim.kill()
            until(lambda: any("agent prefill of process" in line for line in daemon.said), "no line")
        finally:
            victim.finish()
        assert daemon.end() == 0


def test_a_lost_peer_is_one_line_and_not_one_for_each_transfer(tmp_path: Path) -> None:
    with program(tmp_path, "--log", "json") as daemon, daemon.client() as client:
        place = str(daemon.folder / "run")
        survivor, victim = Node("prefill", "shm", daemon=place), Worker("decode", "shm", daemon=place)
        try:
            victim.connect(survivor.address())
            survivor.accept("decode")
            victim.grant("write")
            for block in survivor.all:
                survivor.write([block], hold=True)
            until(lambda: len(client.get("/v1/peers").json()["items"]) == 2, "not attached")
            victim.kill()
            assert all(survivor.end(work) is not None for work in range(len(survivor.all)))
            until(lambda: any('"transfers"' in line for line in daemon.said), "no line")
        finally:
            survivor.close()
            victim.finish()
        assert daemon.end() == 0
    # On a stalled machine the agent's report may come in two parts.
    lines = [line for line in map(json.loads, daemon.said) if "transfers" in line]
    assert len(lines) <= 2
    assert sum(line["transfers"] for line in lines) == len(survivor.all)
    for line in lines:
        assert (line["level"], line["agent"], line["peer"]) == ("warning", "prefill", "decode")
        assert line["code"] in ("peer-lost", "peer-silent")
