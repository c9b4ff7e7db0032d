"""The README: its programs run as processes, its layouts move between agents, and it stays short."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

import kvxfer
from tests.waiting import until

README = (Path(__file__).parents[2] / "README.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
TIMEOUT_S = 60.0
MOST_NBYTES = 10_000
MOVED = f"decode has {4 * 2 * 2 * 16 * 8 * 128} elements\n"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def test_it_is_short() -> None:
    assert len(README.encode()) <= MOST_NBYTES, "tables, history and reference go to docs/"


def test_the_two_programs_of_a_push_move_a_request(tmp_path: Path) -> None:
    port = str(free_port())
    _write_programs(tmp_path, port)
    decode = _started(tmp_path, "push_decode.py")
    try:
        _wait_for_listener(decode, int(port))
        prefill = subprocess.run(
            [sys.executable, "push_prefill.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
        told, _ = decode.communicate(timeout=TIMEOUT_S)
    finally:
        decode.kill()
        decode.wait()
    assert (prefill.returncode, prefill.stderr) == (0, "")
    assert (decode.returncode, told) == (0, MOVED)


def test_the_two_programs_of_a_pull_move_a_request(tmp_path: Path) -> None:
    _write_programs(tmp_path)
    prefill = _started(tmp_path, "pull_prefill.py")
    decode = _started(tmp_path, "pull_decode.py", stdin=prefill.stdout)
    try:
        told, _ = decode.communicate(timeout=TIMEOUT_S)
        left, _ = prefill.communicate(timeout=TIMEOUT_S)
    finally:
        for process in (decode, prefill):
            process.kill()
            process.wait()
    assert (decode.returncode, told) == (0, MOVED)
    assert (prefill.returncode, left) == (0, "")


def _write_programs(folder: Path, port: str = "0") -> None:
    for program in PROGRAMS:
        if named := re.match(r"# (\w+\.py)\n", program):
            # A busy machine takes longer than an engine would wait.
            told = program.replace("7301", port).replace("timeout_s=5", f"timeout_s={TIMEOUT_S}")
            (folder / named[1]).write_text(told)


def _started(folder: Path, name: str, stdin: IO[str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, name],
        cwd=folder,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _wait_for_listener(process: subprocess.Popen[str], port: int) -> None:
    """Waits until the kernel lists a listener; a test connection would count as a stranger."""
    entry = f"0100007F:{port:04X} 00000000:0000 0A"
    until(lambda: process.poll() is not None or entry in Path("/proc/net/tcp").read_text(), "a listener")
    assert process.poll() is None, process.communicate()[0]


def test_its_layouts_go_into_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = (program for program in PROGRAMS if "src = " in program)
    kv, kv8 = np.ones((4, 2, 16, 16, 2, 64), np.uint16), np.zeros((4, 2, 8, 4, 64, 64), np.uint8)
    made: dict[str, Any] = {"kv": kv, "kv8": kv8}
    layouts, transfers = snippet.split("agent.write", 1)
    exec(layouts, made)
    src, dst = made["src"], made["dst"]
    others = [
        kvxfer.KVLayout.from_tensor(kv, "l2bthd", dtype="bfloat16", first_head=2 * rank, total_heads=8)
        for rank in range(4)
    ]
    assert src == others[1]
    made |= {"prefill_layouts": others, "decode_layouts": [dst]}
    with kvxfer.Agent("decode") as decode, kvxfer.Agent("rank0") as rank0, kvxfer.Agent("rank1") as rank1:
        decode.register("kv", kv8, dst)
        for rank, layout in ((rank0, others[0]), (rank1, src)):
            made["region"] = rank.register("kv", kv, layout)
            made["remote"] = rank.connect_blocking(decode.address).region_blocking("kv")
            made["agent"] = rank
            exec(f"transfer = agent.write{transfers.split('incoming =')[0]}", made)
            made[f"of_{rank.name}"] = made["transfer"]
        made["agent"] = decode
        exec(f"incoming ={transfers.split('incoming =')[1]}", made)
        made["incoming"].wait(TIMEOUT_S)
        for rank in (rank0, rank1):
            made[f"of_{rank.name}"].wait(TIMEOUT_S)
    assert "bfloat16" in capsys.readouterr().out
    assert made["share"].dst == 0
