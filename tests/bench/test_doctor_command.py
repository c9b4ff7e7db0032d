"""``kvxfer doctor`` as a user starts it: real processes, a real peer, every byte checked."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("typer")

from kvxfer.doctor import peer_reach
from kvxfer.errors import PeerError

SECRET = "a secret of 24 characters"
# A peer without a region, like an engine that has not registered its cache yet.
PLAIN_AGENT = """
import sys, kvxfer
with kvxfer.Agent("plain-engine") as agent:
    print(agent.address, flush=True)
    sys.stdin.read()
"""
# Peers that imitate a doctor: one flips a byte of a page, one grants nothing, one leaves.
FALSE_DOCTOR = """
import sys, kvxfer
from kvxfer.doctor import pages
kind = sys.argv[1]
pool = kvxfer.Pool(1, pages.TOTAL_NBYTES + 64)
served = pool.array((pages.NUM_PAGES, pages.PAGE_NBYTES))
pages.fill(served)
served[1234, 567] ^= 16
with kvxfer.Agent("false-doctor") as agent:
    regions = [agent.register(pages.REGION, served), agent.register(pages.PING_REGION, pool.array((1, 64)))]
    print(agent.address, flush=True)
    peer = agent.accept_blocking()
    if kind == "flips":
        for region in regions:
            region.grant(peer)
    if kind != "leaves":
        sys.stdin.read()
"""


def environment(secret: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVXFER_")}
    return {**kept, "KVXFER_SECRET": secret} if secret else kept


def doctor(*arguments: str, secret: str = "") -> subprocess.CompletedProcess[str]:
    # -P: the installed package, regardless of the working folder.
    return subprocess.run(
        [sys.executable, "-P", "-m", "kvxfer", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env=environment(secret),
    )


def report_of(*arguments: str, status: int = 0, secret: str = "") -> dict[str, Any]:
    """Runs it with ``--json`` and returns its one line; it measures a peer only briefly."""
    short = ["--measure-s", "0.1"] if "--peer" in arguments else []
    done = doctor(*arguments, *short, "--json", secret=secret)
    assert done.returncode == status, done.stderr + done.stdout
    (line,) = done.stdout.splitlines()
    report: dict[str, Any] = json.loads(line)
    assert report["ok"] == (status == 0)
    return report


def peer_findings(report: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {finding["name"]: finding for finding in report["findings"] if finding["subject"] == "peer"}


@contextlib.contextmanager
def child(command: list[str], secret: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Starts a process that prints a line when it is ready; yields both, and ends it."""
    process = subprocess.Popen(
        [sys.executable, "-P", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(secret),
    )
    with process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline()
        finally:
            process.kill()


@contextlib.contextmanager
def served(*arguments: str, secret: str = "") -> Iterator[str]:
    """Starts ``kvxfer doctor --serve`` in another process; yields its address."""
    command = ["-m", "kvxfer", "doctor", "--serve", "--json", *arguments]
    with child(command, secret) as (process, line):
        yield json.loads(line)["address"]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


@contextlib.contextmanager
def free_address() -> Iterator[str]:
    """Yields an address on which no process listens, and which none can take meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{taken.getsockname()[1]}"


# ---- this machine -------------------------------------------------------------------------------


def test_findings_are_one_json_object_and_status_0() -> None:
    report = report_of("--require", "loopback,shm,tcp")
    assert set(report) == {"findings", "ok", "machine"}
    states = {(finding["subject"], finding["name"]): finding["state"] for finding in report["findings"]}
    assert states["transports", "shm"] == states["transports", "tcp"] == "good"
    assert ("memory", "memfd seals") in states
    if states["huge pages", "a pool"] == "good":
        # Then nothing else about them is to be wanted.
        for finding in report["findings"]:
            if finding["subject"] == "huge pages" and finding["state"] == "note":
                assert "with base pages" not in finding["why"]
                assert not finding["change"]


def test_table_names_every_subject_and_ends_with_the_verdict() -> None:
    done = doctor()
    assert done.returncode == 0, done.stderr
    for subject in ("transports", "foreign memory", "huge pages", "network", "software"):
        assert f"\n{subject}\n" in f"\n{done.stdout}"
    lines = done.stdout.splitlines()
    ready, _, counts = lines[0].partition("; ")
    assert ready.startswith("ready: loopback, ")
    assert {"shm", "unix", "tcp"} <= set(ready.removeprefix("ready: ").split(", "))
    assert counts.startswith("nothing blocks, ")
    assert lines[-1] == lines[0]


def test_problems_stand_alone_and_what_to_do_first_stands_first() -> None:
    more = ["--require", "verbs,cuda_ipc"]
    report = report_of(*more, status=1)
    problems = [finding for finding in report["findings"] if finding["state"] in ("limits", "blocks")]
    blocking = [finding for finding in problems if finding["state"] == "blocks"]
    assert {finding["name"] for finding in blocking} == {"verbs", "cuda_ipc"}
    assert all(finding["change"] for finding in blocking)

    lines = doctor(*more).stdout.splitlines()
    assert lines[0].partition("; ")[2].startswith("2 things block, ")
    steps = [line for line in lines if line[:1].isdigit() and line[1:3] == ". "]
    changes = [finding["change"] for finding in sorted(problems, key=lambda each: each["state"])]
    for step, change in zip(steps, dict.fromkeys(changes), strict=False):
        assert step.endswith(change)
    assert steps

    alone = doctor(*more, "--problems")
    assert alone.returncode == 1
    assert alone.stdout.splitlines()[0] == lines[0]
    assert "  good  " not in alone.stdout
    assert "  note  " not in alone.stdout
    for finding in problems:
        assert finding["name"] in alone.stdout
    told = report_of(*more, "--problems", status=1)
    assert sorted(finding["name"] for finding in told["findings"]) == sorted(
        finding["name"] for finding in problems
    )


# ---- a peer -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("transports", "path"), [("", "shm"), ("tcp", "tcp"), ("unix,tcp", "unix")])
def test_a_doctor_is_measured_over_the_path_that_is_named(transports: str, path: str) -> None:
    willing = ["--transports", transports] if transports else []
    # "unix" is used where both ends name it.
    with served(*willing) as address:
        report = report_of("--peer", address, "--require", path, *willing)
    peer, findings = report["peer"], peer_findings(report)
    assert peer["path"] == path
    assert path in peer["rails"]
    assert (peer["connected"], peer["verified"], peer["name"]) == (True, True, "kvxfer-doctor")
    for figure in ("gb_per_s", "ping_us_p50", "connect_ms", "nbytes"):
        assert peer[figure] > 0
    assert findings["path"]["state"] == "good"
    assert f"GB/s over {path}" in findings["speed"]["found"]
    assert "every byte checked" in findings["speed"]["found"]


def test_a_doctor_that_listens_everywhere_says_where_it_is_reached() -> None:
    with served("--listen", "tcp://0.0.0.0:0", secret=SECRET) as address:
        assert "0.0.0.0" not in address
        assert report_of("--peer", address, secret=SECRET)["peer"]["verified"] is True


def test_another_path_than_the_required_one_is_status_1() -> None:
    with served() as address:
        assert report_of("--peer", address)["peer"]["verified"] is True
        # A second reader, which asks for more.
        report = report_of("--peer", address, "--require", "shm", "--transports", "tcp", status=1)
    assert report["peer"]["path"] == "tcp"
    assert peer_findings(report)["path"]["state"] == "blocks"
    found = peer_findings(report)["path"]["found"]
    assert found.startswith("pages go over tcp, not over shm as --require asks; ")


@pytest.mark.parametrize("more", [(), ("--problems",)], ids=["all", "problems"])
def test_a_peers_path_and_speed_stand_before_all_of_this_machine(more: tuple[str, ...]) -> None:
    with served() as address:
        lines = doctor("--peer", address, "--measure-s", "0.1", *more).stdout.splitlines()
    subjects = [line for line in lines[1:] if line and not line.startswith(" ") and line[1:3] != ". "]
    assert subjects[0] == "peer"
    assert any(line.split()[:2] == ["speed", "good"] and "GB/s over shm" in line for line in lines)


def test_a_peer_that_is_no_doctor_is_connected_and_not_measured() -> None:
    with child(["-c", PLAIN_AGENT]) as (_, address):
        report = report_of("--peer", address.strip())
    findings = peer_findings(report)
    assert "connected to 'plain-engine'" in findings["session"]["found"]
    assert findings["path"]["found"].startswith("shm")
    assert findings["speed"]["state"] == "note"
    assert "not measured" in findings["speed"]["found"]
    assert "gb_per_s" not in report["peer"]


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("flips", "speed", "1 of the 2048 pages of one reading over shm have wrong bytes"),
        ("grants-nothing", "speed", "pages could not be read: "),
        ("leaves", "session", ""),
    ],
)
def test_a_doctor_that_fails_is_status_1(kind: str, name: str, words: str) -> None:
    with child(["-c", FALSE_DOCTOR, kind]) as (_, address):
        report = report_of("--peer", address.strip(), status=1)
    finding = peer_findings(report)[name]
    assert finding["state"] == "blocks"
    assert words in finding["found"]
    assert finding["change"]
    if kind == "flips":
        assert report["peer"]["verified"] is False


def test_a_peer_that_is_not_there_is_status_1() -> None:
    with free_address() as address:
        report = report_of("--peer", address, "--timeout-s", "2", status=1)
    assert report["peer"]["connected"] is False
    session = peer_findings(report)["session"]
    assert session["state"] == "blocks"
    assert "cannot connect" in session["found"]
    assert session["change"]


def test_a_wrong_secret_is_named_and_the_right_one_opens() -> None:
    with served(secret=SECRET) as address:
        for theirs in ("", "another secret of 29 characters"):
            report = report_of("--peer", address, secret=theirs, status=1)
            session = peer_findings(report)["session"]
            assert "auth-failed" in session["found"]
            assert "KVXFER_SECRET" in session["change"]
        assert report_of("--peer", address, secret=SECRET)["peer"]["verified"] is True


def test_a_port_of_rest_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(agent: object, address: str) -> None:
        raise PeerError(f"cannot connect to {address}: Connection refused", code="unreachable")

    monkeypatch.setattr("kvxfer.Agent.connect_blocking", refused)
    for port, words in (
        (7380, "7380 is the port of a daemon's REST"),
        (7301, "start the peer (kvxfer doctor"),
    ):
        ((session,), _) = peer_reach.examine(f"tcp://10.0.0.7:{port}", ("tcp",))
        assert session.found == f"cannot connect to tcp://10.0.0.7:{port}: Connection refused [unreachable]"
        assert session.change.startswith(words)


def test_a_socket_that_is_no_agent_is_status_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        report = report_of("--peer", address, "--timeout-s", "1", status=1)
    assert peer_findings(report)["session"]["change"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serving_ends_with_status_0_when_interrupted(number: signal.Signals) -> None:
    with child(["-m", "kvxfer", "doctor", "--serve"]) as (process, line):
        assert line.startswith("serving pages at tcp://127.0.0.1:")
        process.send_signal(number)
        assert process.wait(30) == 0
