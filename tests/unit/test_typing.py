"""A user's program is checked against the package's types, its public names included."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import asyncio

import numpy as np

import kvxfer


async def main() -> None:
    kv = np.zeros((4, 2, 64, 16, 8, 128), np.float16)
    known: kvxfer.directory.Directory = kvxfer.directory.MemoryDirectory()
    options = kvxfer.AgentOptions(shm_peers="user", directory_ttl_s=10)
    async with kvxfer.Agent("prefill", options, directory=known, metadata={"role": "prefill"}) as agent:
        region = agent.register("kv", kv, kvxfer.KVLayout.from_tensor(kv, axes="l2bthd"))
        peer = await agent.connect("tcp://127.0.0.1:7301", timeout_s=5)
        with region.grant(peer, blocks=[7, 9], mode="read") as lease:
            assert await agent.connect(peer.regions["kv"]) is await agent.connect(agent.entry)
            transfer = agent.write(region, await peer.region("kv"), [7, 9], [3, 4], notify=b"req-42")
            await transfer
        if transfer.state is kvxfer.TransferState.DONE and lease.state is not kvxfer.LeaseState.ACTIVE:
            print(agent.stats()["peers"][0]["budget"], kvxfer.plan.footprint(region.layout))
            print(kvxfer.gpu.include_path())
        async for note in agent.notifications():
            print(note.payload.decode(), note.peer.state is kvxfer.PeerState.OPEN)


asyncio.run(main())
"""
MISTAKES = """
import kvxfer

kvxfer.Agnet
kvxfer.gpu.share_memory
kvxfer.AgentOptions(shm_peers="all")
kvxfer.Agent("prefill").stats()["transfers"]
"""

pytestmark = pytest.mark.slow  # mypy reads numpy first


def checked(folder: Path, program: str) -> str:
    pytest.importorskip("mypy", reason="the extra dev is not installed")
    (folder / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "program.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_a_small_program_passes_in_strict_mode(tmp_path: Path) -> None:
    assert checked(tmp_path, PROGRAM).startswith("Success")


def test_mistakes_in_names_modes_and_counters_are_found(tmp_path: Path) -> None:
    found = checked(tmp_path, MISTAKES)
    assert re.findall(r"program\.py:(\d+): error: .*\[([\w-]+)\]", found) == [
        ("4", "attr-defined"),
        ("5", "attr-defined"),
        ("6", "arg-type"),
        ("7", "typeddict-item"),
    ]
