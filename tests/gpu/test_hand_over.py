"""GPU memory of a process without an agent: a daemon takes and moves it; it ends with the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvxfer
from kvxfer.control.handed.hand_over import hand_over
from kvxfer.control.handed.handed_memory import HandedMemory
from kvxfer.control.own.own_agent import OwnAgent
from tests.waiting import until_on_loop

pytestmark = pytest.mark.gpu

TIMEOUT_S = 60.0
SHAPE = (32, 1 << 20)  # blocks, bytes of a page


def pattern(seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, SHAPE, np.uint8)


def main(folder: str, seed: str) -> None:
    """Hands a tensor over; prints the region's name, and for each input line whether it is the seed."""
    import torch

    from kvxfer.gpu import shareable_memory

    with shareable_memory():
        cache = torch.from_numpy(pattern(int(seed))).cuda()
    torch.cuda.synchronize()
    handed = hand_over(cache, kvxfer.KVLayout.from_tensor(cache, "bd"), "cache", daemon=folder)
    print(handed.region, handed.address, flush=True)
    for line in sys.stdin:
        torch.cuda.synchronize()
        print(bool((cache.cpu().numpy() == pattern(int(line))).all()), flush=True)


class Owner:
    """A process that has handed its tensor over."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.test_hand_over", str(folder), str(seed)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def line(self) -> list[str]:
        assert self.process.stdout is not None
        told = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), TIMEOUT_S)
        return str(told).split()

    async def has(self, seed: int) -> bool:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()
        return await self.line() == ["True"]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@asynccontextmanager
async def taking(folder: Path) -> AsyncIterator[HandedMemory]:
    """Accepts memory of the GPU through a folder."""
    parent = OwnAgent("n", kvxfer.AgentOptions(silent_timeout_s=60.0))
    found = HandedMemory(folder, parent, gpu=0)
    await found.start()
    try:
        yield found
    finally:
        await found.aclose()
        await parent.aclose()


async def moves(folder: Path) -> None:
    async with taking(folder) as taken:
        owner = Owner(folder, 1)
        try:
            name, address = await owner.line()
            region = taken.agent.region(name)
            async with kvxfer.Agent("peer", kvxfer.AgentOptions(silent_timeout_s=60.0)) as peer:
                memory = np.zeros(SHAPE, np.uint8)
                mine = peer.register("mine", memory)
                session = await peer.connect(address)
                remote = await session.region(name, TIMEOUT_S)
                blocks = range(SHAPE[0])
                token = region.grant(None, ttl_s=TIMEOUT_S).token
                await peer.read(mine, remote, blocks, blocks, lease=token, timeout_s=TIMEOUT_S)
                assert (memory == pattern(1)).all()
                memory[:] = pattern(2)
                back = next(each for each in taken.agent.agent.peers if each.name == "peer")
                lease = await region.grant(back, mode="write", ttl_s=TIMEOUT_S)
                await peer.write(mine, remote, blocks, blocks, lease=lease.token, timeout_s=TIMEOUT_S)
                assert await owner.has(2)
                # The owner dies while pages are read: the mapping keeps the memory until nothing copies it.
                reads = [
                    peer.read(mine, remote, blocks, blocks, lease=token, timeout_s=TIMEOUT_S)
                    for _ in range(16)
                ]
                owner.kill()
                await until_on_loop(lambda: not taken._names)
                ends = await asyncio.gather(*reads, return_exceptions=True)
                codes = {end.code if isinstance(end, kvxfer.KvxferError) else "done" for end in ends}
                assert codes <= {"done", "region-gone", "lease-ended", "cancelled"}
                assert not taken.agent.agent.regions
        finally:
            owner.kill()
        # The daemon still works: another process takes the name.
        other = Owner(folder, 3)
        try:
            assert (await other.line())[0] == name
            assert await other.has(3)
        finally:
            other.kill()
        await until_on_loop(lambda: not taken._names)


def test_a_tensor_is_read_and_written_by_others_and_goes_with_its_process(tmp_path: Path) -> None:
    asyncio.run(moves(tmp_path))


async def refuses(folder: Path) -> None:
    import torch

    cache = torch.zeros(SHAPE, dtype=torch.uint8, device="cuda")
    async with taking(folder) as taken:
        with pytest.raises(kvxfer.UsageError, match="shareable_memory"):
            hand_over(cache, kvxfer.KVLayout.from_tensor(cache, "bd"), "cache", daemon=folder)
        assert not taken.regions


def test_memory_that_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    asyncio.run(refuses(tmp_path))


if __name__ == "__main__":
    main(*sys.argv[1:])
