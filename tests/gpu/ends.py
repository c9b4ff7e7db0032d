"""Two agents, each with a cache on the GPU: transfers wait for streams, and streams for transfers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import kvxfer
from kvxfer.gpu import shareable_memory

TIMEOUT_S = 60.0
SHAPE = (4, 64 * 1024)
# In cycles: so long that a byte that does not wait certainly comes too early.
LONG = 200_000_000


class Ends:
    """Two agents of this process, each with a cache on the GPU.

    The caches lie in memory of cudaMalloc, which only another process may open, so that pages are staged; or
    in the pool's memory, which cuda_ipc carries here as well.
    """

    def __init__(self, src: kvxfer.Agent, dst: kvxfer.Agent, pooled: bool) -> None:
        import torch

        self.src, self.dst = src, dst
        with shareable_memory() if pooled else contextlib.nullcontext():
            self.pages = torch.zeros(SHAPE, dtype=torch.uint8, device="cuda")
            self.landed = torch.zeros_like(self.pages)
        torch.cuda.synchronize()
        self.region, target = src.register("kv", self.pages), dst.register("kv", self.landed)
        there = src.connect_blocking(dst.address, TIMEOUT_S)
        here = dst.accept_blocking("src", TIMEOUT_S)
        target.grant(here, None, "write", ttl_s=TIMEOUT_S)
        self.lease = self.region.grant(there, None, "read", ttl_s=TIMEOUT_S)
        self.remote = there.region_blocking("kv", TIMEOUT_S)
        self.target, self.source = target, here.region_blocking("kv", TIMEOUT_S)
        self.stream = torch.cuda.Stream()

    def write(self, after: Any) -> kvxfer.Transfer:
        blocks = range(SHAPE[0])
        return self.src.write(self.region, self.remote, blocks, blocks, after=after, timeout_s=TIMEOUT_S)

    def read(self, after: Any, timeout_s: float = TIMEOUT_S) -> kvxfer.Transfer:
        blocks = range(SHAPE[0])
        return self.dst.read(
            self.target, self.source, blocks, blocks, after=after, timeout_s=timeout_s, lease=self.lease.token
        )

    def produce(self, value: int) -> None:
        """Enqueues in the stream: waits a while, then fills the cache."""
        import torch

        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(LONG)
            self.pages.fill_(value)

    def arrived(self, value: int) -> bool:
        import torch

        torch.cuda.synchronize()
        return bool((self.landed == value).all())


@pytest.fixture(params=["staged", "cuda_ipc"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    options = kvxfer.AgentOptions(listen="tcp://127.0.0.1:0", transports=("shm", "cuda_ipc", "tcp"))
    with kvxfer.Agent("src", options) as src, kvxfer.Agent("dst", options) as dst:
        yield Ends(src, dst, request.param == "cuda_ipc")
