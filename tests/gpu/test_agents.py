"""Agents of two processes whose caches lie on one GPU: writes, reads, and what ends them."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvxfer

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).parent / "source_agent.py"
TIMEOUT_S = 60.0


class Source:
    """The other process."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.address = self.answer()

    def answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, f"the source ended with {self.process.wait(TIMEOUT_S)}"
        return line

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Decode:
    """This process's agent, its caches, and the source's."""

    def __init__(self, source: Source) -> None:
        import torch

        made = runpy.run_path(str(PROGRAM))
        self.pattern = made["pattern"]
        self.shape = made["SHAPE"]
        self.blocks = list(range(self.shape[1]))
        self.source = source
        options = kvxfer.AgentOptions(transports=("shm", "cuda_ipc", "tcp"))
        self.agent = kvxfer.Agent("decode", options)
        self.cache = torch.zeros(self.shape, dtype=torch.uint8, device="cuda")
        self.host = torch.zeros(self.shape, dtype=torch.uint8)
        torch.cuda.synchronize()
        layout = kvxfer.KVLayout.from_tensor(self.cache, axes="lbd")
        self.region = self.agent.register("cache", self.cache, layout)
        self.host_region = self.agent.register("host cache", self.host, layout)
        self.peer = self.agent.connect_blocking(source.address, TIMEOUT_S)
        self.remote = {
            name: self.peer.region_blocking(name, TIMEOUT_S) for name in ("pages", "target", "host")
        }
        assert source.answer() == "granted"

    def read(self, region: kvxfer.Region, name: str) -> kvxfer.Transfer:
        turned = self.blocks[::-1]
        return self.agent.read(region, self.remote[name], self.blocks, turned, timeout_s=TIMEOUT_S)


@pytest.fixture
def decode() -> Iterator[Decode]:
    source = Source()
    try:
        made = Decode(source)
        with made.agent:
            yield made
    finally:
        source.kill()


def code_of(transfer: kvxfer.Transfer) -> str:
    """Waits for the end and returns the error's code, or "" if the transfer is done."""
    try:
        transfer.wait(TIMEOUT_S)
    except kvxfer.TransferError as error:
        return error.code
    return ""


def require_same(found: Any, wanted: Any) -> None:
    assert int((found.cpu() != wanted).sum()) == 0


def test_pages_are_read_and_written_between_processes_beside_host_memory(decode: Decode) -> None:
    import torch

    assert "cuda_ipc" in decode.peer.rails
    assert decode.region.kind == "gpu"
    assert decode.peer.regions["pages"].path == "cuda_ipc"
    assert decode.peer.regions["host"].path in ("shm", "unix")
    on_gpu, on_host = decode.read(decode.region, "pages"), decode.read(decode.host_region, "host")
    on_gpu.wait(TIMEOUT_S)
    on_host.wait(TIMEOUT_S)
    require_same(decode.cache, decode.pattern(1).flip(1))
    require_same(decode.host, decode.pattern(2).flip(1))

    decode.cache.copy_(decode.pattern(3))
    torch.cuda.synchronize()
    decode.agent.write(
        decode.region, decode.remote["target"], decode.blocks, decode.blocks, timeout_s=TIMEOUT_S
    ).wait(TIMEOUT_S)
    assert decode.source.ask("compare 3") == "0"


def test_what_was_read_under_a_lease_that_ended_is_the_old_page_or_not_done(decode: Decode) -> None:
    transfers = [decode.read(decode.region, "pages") for _ in range(20)]
    assert decode.source.ask("revoke") == "revoked"
    ended = [code_of(transfer) for transfer in transfers]
    assert set(ended) <= {"", "lease-ended"}
    # A transfer that was done contains nothing that the source wrote afterwards; nothing arrives after the
    # last one.
    if not any(ended):
        require_same(decode.cache, decode.pattern(1).flip(1))
    with pytest.raises(kvxfer.KvxferError):
        decode.read(decode.region, "pages").wait(TIMEOUT_S)


def test_a_source_that_takes_its_memory_back_or_dies_ends_transfers_and_no_more(decode: Decode) -> None:
    decode.read(decode.region, "pages").wait(TIMEOUT_S)
    assert decode.source.ask("deregister") == "deregistered"
    with pytest.raises(kvxfer.KvxferError):
        decode.read(decode.region, "pages").wait(TIMEOUT_S)
    decode.read(decode.host_region, "host").wait(TIMEOUT_S)
    require_same(decode.host, decode.pattern(2).flip(1))
    decode.source.kill()
    with pytest.raises(kvxfer.PeerError):
        decode.read(decode.host_region, "host").wait(TIMEOUT_S)


def test_pages_go_between_the_gpu_and_host_memory_staged(decode: Decode) -> None:
    for region, name, seed in ((decode.region, "host", 2), (decode.host_region, "pages", 1)):
        transfer = decode.read(region, name)
        transfer.wait(TIMEOUT_S)
        assert transfer.rails in (("unix",), ("tcp",))
        cache = decode.cache if region is decode.region else decode.host
        require_same(cache, decode.pattern(seed).flip(1))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_agents_of_one_process_stage_over_tcp(device: str) -> None:
    """As between two hosts: a process cannot open handles of its own memory, so cuda_ipc is not used."""
    import torch

    shape = 2, 12, 300_000
    there = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    here = torch.zeros(shape, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    layout = kvxfer.KVLayout.from_tensor(there, axes="lbd")
    on_gpu = kvxfer.AgentOptions(transports=("cuda_ipc", "tcp"), staging_nbytes=4 << 20)
    alone = kvxfer.AgentOptions(transports=("tcp",))
    with (
        kvxfer.Agent("prefill", on_gpu) as prefill,
        kvxfer.Agent("decode", on_gpu if device == "cuda" else alone) as decode,
    ):
        source = prefill.register("pages", there, layout)
        region = decode.register("cache", here, layout)
        peer = decode.connect_blocking(prefill.address, TIMEOUT_S)
        source.grant(prefill.accept_blocking(timeout_s=TIMEOUT_S), mode="read", ttl_s=300)
        blocks = list(range(shape[1]))
        transfer = decode.read(
            region, peer.region_blocking("pages", TIMEOUT_S), blocks, blocks[::-1], timeout_s=TIMEOUT_S
        )
        transfer.wait(TIMEOUT_S)
        torch.cuda.synchronize()
        require_same(here, there.cpu().flip(1))


def test_checksums_of_pages_on_a_gpu_are_refused(decode: Decode) -> None:
    with pytest.raises(kvxfer.UsageError, match="integrity=False"):
        decode.agent.read(decode.region, decode.remote["pages"], decode.blocks, decode.blocks, integrity=True)
