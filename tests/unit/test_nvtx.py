"""The ranges of transfers, as a tool sees them that was compiled against NVIDIA's own headers."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

ROOT = Path(__file__).parents[2]
RECORDER = ROOT / "tests" / "native" / "nvtx" / "recorder.cpp"

MOVE = """
import sys
import numpy as np
import kvxfer
from tests.waiting import until

options = kvxfer.AgentOptions(listen="tcp://127.0.0.1:0", transports=tuple(sys.argv[1:]))
with kvxfer.Agent("src", options) as src, kvxfer.Agent("dst", options) as dst:
    pages, landed = np.ones((8, 4096), np.uint8), np.zeros((8, 4096), np.uint8)
    region, target = src.register("kv", pages), dst.register("kv", landed)
    there = src.connect_blocking(dst.address, 60)
    here = dst.accept_blocking("src", 60)
    # The end that moves the bytes has the rail a moment later.
    until(lambda: set(sys.argv[1:]) <= set(here.rails), lambda: here.rails)
    target.grant(here, None, "write", ttl_s=60)
    remote = there.region_blocking("kv", 60)
    trigger = src.trigger()
    written = src.write(region, remote, [1, 2], [3, 4], after=trigger, timeout_s=60)
    trigger.fire()
    written.wait(60)
    assert landed[3].all() and landed[4].all()
"""


def headers() -> Path:
    """Returns the folder of NVIDIA's headers, as its wheel brings them."""
    try:
        files = importlib.metadata.files("nvidia-nvtx") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.fail("`make unit` installs nvidia-nvtx (pyproject.toml, dev)")
    return next(Path(str(file.locate())).parents[1] for file in files if file.name == "nvToolsExt.h")


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tool that writes down the calls that it gets."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    assert compiler, "what built the native module is gone: install a C++ compiler"
    built = tmp_path_factory.mktemp("nvtx") / "recorder.so"
    command = [compiler, "-std=c++20", "-shared", "-fPIC", "-DNVIDIA_HEADERS", f"-isystem{headers()}"]
    subprocess.run([*command, RECORDER, "-o", built], check=True)
    return built


def ranges(tool: str, recording: Path, *transports: str) -> Counter[str]:
    """Moves two pages under a tool; returns how often each range began. All ranges must have ended."""
    environment = {**os.environ, "NVTX_INJECTION64_PATH": tool, "KVXFER_RECORDING": str(recording)}
    # The script bounds its own waits, and the suite bounds this call.
    subprocess.run([sys.executable, "-c", MOVE, *transports], env=environment, cwd=ROOT, check=True)
    if not recording.exists():
        return Counter()
    lines = recording.read_text().splitlines()
    begun = {
        found[1]: found[2] for line in lines if (found := re.fullmatch(r"\+(\d+) kvxfer \d+ (.+)", line))
    }
    ended = [found[1] for line in lines if (found := re.fullmatch(r"-(\d+) kvxfer", line))]
    assert len(begun) + len(ended) == len(lines)
    assert sorted(ended) == sorted(begun)
    return Counter(begun.values())


@pytest.mark.parametrize(
    ("transports", "moved"),
    [
        (("tcp",), {"send tcp": 1, "receive tcp": 1}),
        (("shm",), {"fetch shm": 1}),
        (("loopback",), {"fetch loopback": 1}),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_every_stage_is_told(
    tool: Path, tmp_path: Path, transports: tuple[str, ...], moved: dict[str, int]
) -> None:
    found = ranges(str(tool), tmp_path / "recording", *transports)
    assert found["transfer"] == 1
    assert found["wait for trigger"] == 1
    assert {name: found[name] for name in moved} == moved


def test_a_tool_that_is_not_there_changes_nothing(tmp_path: Path) -> None:
    assert not ranges(str(tmp_path / "missing.so"), tmp_path / "recording", "loopback")
    no_tool = tmp_path / "empty.so"
    no_tool.write_bytes(b"no library")
    assert not ranges(str(no_tool), tmp_path / "recording", "loopback")
