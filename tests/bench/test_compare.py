"""Comparisons with a stand-in process that moves bytes over a socket, and with the real software."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from kvxfer.bench.compare import baseline as baselines
from kvxfer.bench.compare import measure as compare
from kvxfer.bench.compare import work as baseline_work
from kvxfer.bench.compare.baseline import Baseline, known_baselines
from kvxfer.bench.compare.measure import CompareOptions
from kvxfer.bench.run import process
from kvxfer.bench.run.counters import EVENTS

pytest.importorskip("typer")

SYSTEMS = ["kvxfer", "stand-in"]
SPREAD = {"min", "median", "max"}
SMALL: dict[str, Any] = {"total_mib": 2, "rounds": 2, "iterations": 1, "timeout_s": 20.0}

# Copies pages through its own TCP connection; `misbehaves` says what goes wrong in which move.
STAND_IN = """
import ctypes, json, os, queue, socket, struct, sys, threading, time

_FRAME = struct.Struct("<cQQI")  # what, offset, nbytes, length of a tag


class StandIn:
    version = "1"
    must_poll = False

    def __init__(self, options):
        self.settings = {"misbehaves": options["misbehaves"]}
        self._misbehaves = options["misbehaves"]
        self._role = options["role"]
        self._server = socket.create_server(("127.0.0.1", 0))
        self._tags = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def register(self, address, nbytes):
        self._memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")

    def contact(self):
        return {"port": self._server.getsockname()[1]}

    def connect(self, contact):
        self._stream = socket.create_connection(("127.0.0.1", contact["port"]))
        self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def prepare(self, page_nbytes, num_pages):
        self._nbytes = page_nbytes

    def move(self, op, local, remote, tag, timeout_s):
        if self._misbehaves == "crashes":
            print("frames", "stand-in: the device is on fire", sep="\\n", file=sys.stderr, flush=True)
            os.abort()
        if self._misbehaves == "refuses":
            raise RuntimeError("no such peer")
        if self._misbehaves == "hangs":
            print("stand-in: waiting for a completion", file=sys.stderr, flush=True)
            time.sleep(3600)
        start_ns = time.monotonic_ns()
        for near, far in zip(local.tolist(), remote.tolist()):
            page = self._memory[near * self._nbytes : (near + 1) * self._nbytes]
            if op == "write":
                self._stream.sendall(_FRAME.pack(b"w", far * self._nbytes, self._nbytes, 0))
                self._stream.sendall(page)
            else:
                self._stream.sendall(_FRAME.pack(b"r", far * self._nbytes, self._nbytes, 0))
                self._stream.recv_into(page, self._nbytes, socket.MSG_WAITALL)
        if self._misbehaves == "lies":
            page[-1] ^= 1
            if op == "write":
                self._stream.sendall(_FRAME.pack(b"w", far * self._nbytes, self._nbytes, 0))
                self._stream.sendall(page)
        self._stream.sendall(_FRAME.pack(b"n", 0, 0, len(tag)) + tag.encode())
        self._stream.recv(1)
        return time.monotonic_ns() - start_ns

    def notifications(self):
        return [] if self._tags.empty() else [self._tags.get()]

    def _serve(self):
        stream, _ = self._server.accept()
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while head := stream.recv(_FRAME.size, socket.MSG_WAITALL):
            what, offset, nbytes, length = _FRAME.unpack(head)
            if what == b"w":
                stream.recv_into(self._memory[offset : offset + nbytes], nbytes, socket.MSG_WAITALL)
            elif what == b"r":
                stream.sendall(self._memory[offset : offset + nbytes])
            else:
                self._tags.put(stream.recv(length, socket.MSG_WAITALL).decode())
                stream.sendall(b"!")


def create(options):
    # Of all rounds the stand-in counts the fresh starts in a file.
    count = os.path.join(os.path.dirname(__file__), options["role"] + ".count")
    starts = int(open(count).read()) if os.path.exists(count) else 0
    open(count, "w").write(str(starts + 1))
    how, _, after = os.environ.get("STAND_IN", options.get("misbehaves", "")).partition(":")
    return StandIn({**options, "misbehaves": how if how and starts >= int(after or 0) else ""})
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "stand_in.py").write_text(textwrap.dedent(STAND_IN))
    return tmp_path


def stand_in(folder: Path, misbehaves: str = "") -> Baseline:
    """Returns the baseline; ``misbehaves`` names a fault and its first start, as ``crashes:1``."""
    return Baseline(
        "stand-in",
        "nixl",
        sys.executable,
        "stand_in",
        {"shm": "tcp", "tcp": "tcp"},
        options={"misbehaves": misbehaves},
        environment={"PYTHONPATH": str(folder)},
    )


def run(folder: Path, misbehaves: str = "", **fields: Any) -> dict[str, Any]:
    options = CompareOptions(**{"against": ("nixl",), **SMALL, **fields})
    return compare.run(options, lambda at: None, (stand_in(folder, misbehaves),))


def check_compared(result: dict[str, Any], systems: list[str]) -> None:
    assert result["verified"] is True
    assert result["failures"] == {}
    assert list(result["systems"]) == systems
    figures = set(compare.FIGURES[result["work"]])
    for system in result["systems"].values():
        assert system["version"]
        assert isinstance(system["settings"], dict)
        assert all(set(system[figure]) == SPREAD for figure in figures)
        counted = EVENTS.keys() - result["not_counted"].keys() if result["work"] != "setup" else set()
        assert EVENTS.keys() & system.keys() == counted
    assert len(result["rounds_measured"]) == result["rounds"]
    for other in systems[1:]:
        assert set(result["ratios"][other]) == figures
        for ratio in result["ratios"][other].values():
            assert set(ratio) == {*SPREAD, "rounds"}
            assert len(ratio["rounds"]) == result["rounds"]


@pytest.mark.parametrize(
    "fields",
    [
        {"op": "write"},
        {"rounds": 1, "transport": "tcp", "op": "read"},
        {"rounds": 1, "work": "latency", "iterations": 60},
    ],
    ids=lambda fields: next(iter(reversed(fields))),
)
def test_the_same_work_is_done_and_checked_by_both(folder: Path, fields: dict[str, Any]) -> None:
    result = run(folder, **fields)
    check_compared(result, SYSTEMS)
    turns = [SYSTEMS, SYSTEMS[::-1]][: fields.get("rounds", 2)]
    assert [list(one) for one in result["rounds_measured"]] == turns


@pytest.mark.parametrize("work", ["pages", "latency"])
def test_wrong_bytes_of_a_baseline_end_the_run(folder: Path, work: str) -> None:
    # Each round starts two processes. With pages it misbehaves from the second round on, with latency at
    # once.
    result = run(folder, "lies:1" if work == "pages" else "lies", work=work)
    assert result["verified"] is False
    assert result["failure"].startswith("stand-in: ")
    assert "expected 0x" in result["failure"]
    if work == "pages":
        assert list(result["systems"]) == SYSTEMS  # of the first round


def test_baseline_that_crashes_is_left_out_with_its_last_words_and_what_it_gave_is_kept(folder: Path) -> None:
    result = run(folder, "crashes:1", rounds=3)
    assert result["verified"] is True
    words = result["failures"]["stand-in"]
    assert "killed by signal 6" in words
    assert "stand-in: the device is on fire" in words
    # The second round begins with the stand-in: kvxfer continues without it.
    assert [list(one) for one in result["rounds_measured"]] == [SYSTEMS, ["kvxfer"], ["kvxfer"]]
    assert len(result["ratios"]["stand-in"]["gb_per_s"]["rounds"]) == 1


def test_baseline_that_hangs_is_given_up_and_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline_work, "_SLACK_S", 0.5)
    monkeypatch.setattr(process, "_END_TIMEOUT_S", 0.2)
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def remember(*arguments: Any, **fields: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **fields))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", remember)
    # Long enough for everything that does not hang on a busy machine, including kvxfer's own part.
    result = run(folder, "hangs", timeout_s=5.0, rounds=1)
    assert "stand-in source process sent nothing for 5.5 s (still running)" in result["failures"]["stand-in"]
    assert "stand-in: waiting for a completion" in result["failures"]["stand-in"]
    assert list(result["systems"]) == ["kvxfer"]
    assert all(process.poll() is not None for process in started)


def command(folder: Path, misbehaves: str, *arguments: str) -> subprocess.Popen[str]:
    """Starts the command as a user does, with the stand-in in NIXL's place."""
    python = folder / "nixl" / "bin" / "python"
    python.parent.mkdir(parents=True)
    there = "kvxfer.bench.compare.adapters.nixl_adapter"
    told = f'"$(echo "$4" | sed s/{there}/stand_in/)"'
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$1" "$2" "$3" {told}\n')
    python.chmod(0o755)
    small = ["--against", "nixl", "--total-mib", "2", "--iterations", "1", "--timeout-s", "20"]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "kvxfer.bench", "compare", *small, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, baselines.ENVIRONMENTS_VARIABLE: str(folder), "STAND_IN": misbehaves},
        start_new_session=True,
    )


@pytest.mark.parametrize(("misbehaves", "status"), [("", 0), ("lies", 1), ("crashes:2", 2)])
def test_exit_status_and_table_say_how_it_ended(folder: Path, misbehaves: str, status: int) -> None:
    process = command(folder, misbehaves, "--rounds", "2" if misbehaves else "1")
    output, errors = process.communicate(timeout=200)
    assert process.returncode == status, errors
    words = {
        0: ("how many times better kvxfer is", "misbehaves=", "every byte checked"),
        1: ("check failed: nixl: ", "expected 0x"),
        2: ("how many times better", "nixl failed and was left out", "the device is on fire"),
    }
    for expected in words[status]:
        assert expected in output


def installed(software: str) -> bool:
    return all(one.is_installed for one in known_baselines() if one.software == software)


def real(software: str) -> Any:
    reason = f"{software} is not installed: `make baselines` installs it"
    return pytest.param(software, marks=pytest.mark.skipif(not installed(software), reason=reason))


@pytest.mark.slow
@pytest.mark.parametrize("software", [real("nixl"), real("mooncake")])
@pytest.mark.parametrize(
    "fields",
    [
        {"transport": "shm", "op": "write", "memory": "foreign"},
        {"transport": "tcp", "op": "write"},
        {"transport": "tcp", "op": "read", "block_kib": 4},
        {"work": "latency", "transport": "shm", "iterations": 20},
        {"work": "latency", "transport": "tcp", "iterations": 150},
        {"work": "setup"},
    ],
    ids=lambda fields: "-".join(str(value) for value in fields.values()),
)
def test_real_software_does_the_same_work(software: str, fields: dict[str, Any]) -> None:
    options = CompareOptions(**{"against": (software,), **SMALL, "total_mib": 16, "rounds": 1, **fields})
    result = compare.run(options, lambda at: None)
    names = [one.name for one in known_baselines() if one.software == software]
    check_compared(result, ["kvxfer", *names])
    assert result["notes"]
