"""Two engines with loops of their own, which never wait for a transfer: every step computes and polls.

    python engine_loop.py    # prefill and decode are processes; a pipe stands for the router

docs/tutorials/engine-loop.md explains each step.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import sys
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvxfer

SHAPE = (4, 2, 16, 16, 8, 128)  # [layers, K and V, blocks, tokens, heads, dim]
BLOCK_NBYTES = 4 * 2 * 16 * 8 * 128 * 2  # one block in all layers, float16
NUM_REQUESTS, NUM_BLOCKS, NUM_STEPS = 10, 3, 5  # steps of decoding, until a request has its last token


class Engine:
    """What both engines have: a cache of 16 blocks, and an agent."""

    def __init__(self, name: str, router: Connection) -> None:
        self.router = router
        self.pool = kvxfer.Pool(SHAPE[2], BLOCK_NBYTES)
        self.kv = self.pool.array(SHAPE, np.float16)
        self.agent = kvxfer.Agent(name)
        layout = kvxfer.KVLayout.from_tensor(self.kv, axes="l2bthd")
        self.region = self.agent.register("kv", self.kv, layout)
        self.num_over = 0

    def step(self) -> None:
        raise NotImplementedError

    def run(self) -> None:
        while self.num_over < NUM_REQUESTS:
            self.step()
        self.agent.close()
        self.pool.close()


# --8<-- [start:prefill]
class Prefill(Engine):
    def __init__(self, router: Connection) -> None:
        super().__init__("prefill-0", router)
        self.prompts = deque(f"req-{number}" for number in range(NUM_REQUESTS))
        self.kept: dict[str, tuple[kvxfer.Lease, NDArray[Any]]] = {}

    def step(self) -> None:
        if self.prompts and self.pool.num_free >= NUM_BLOCKS:
            name = self.prompts.popleft()
            blocks = self.pool.allocate(NUM_BLOCKS, owner=name).ids
            self.kv[:, :, blocks] = np.random.default_rng().random(
                (4, 2, NUM_BLOCKS, 16, 8, 128)
            )  # the forward
            lease = self.region.grant("decode-0", blocks, mode="read", ttl_s=30)
            self.kept[name] = lease, blocks
            told = {"name": name, "address": self.agent.address, "lease": str(lease.token)}
            self.router.send({**told, "blocks": blocks.tolist(), "digest": digest(self.kv, blocks)})
        self.agent.poll()
        while (note := self.agent.take_notification()) is not None:
            self.let_go(note.payload.decode())
        for name in [name for name, (lease, _) in self.kept.items() if lease.state.is_final]:
            self.let_go(name)  # its decode never came

    def let_go(self, name: str) -> None:
        lease, blocks = self.kept.pop(name)
        lease.revoke_blocking()
        self.pool.free(blocks)
        self.num_over += 1
        # --8<-- [end:prefill]


# --8<-- [start:decode]
class Decode(Engine):
    def __init__(self, router: Connection) -> None:
        super().__init__("decode-0", router)
        self.waiting: deque[dict[str, Any]] = deque()
        self.reading: dict[str, tuple[kvxfer.Transfer, NDArray[Any], str]] = {}
        self.running: dict[str, tuple[NDArray[Any], int]] = {}
        self.remote: kvxfer.RegionDescriptor | None = None
        self.num_told = self.num_right = 0

    def step(self) -> None:
        while self.num_told < NUM_REQUESTS and self.router.poll():
            self.waiting.append(self.router.recv())
            self.num_told += 1
        while self.waiting and self.pool.num_free >= NUM_BLOCKS:
            self.begin(self.waiting.popleft())
        self.agent.poll()
        for name, (transfer, blocks, wanted) in list(self.reading.items()):
            if transfer.state is kvxfer.TransferState.PENDING:
                continue
            del self.reading[name]
            if transfer.succeeded:
                self.num_right += digest(self.kv, blocks) == wanted
                self.running[name] = blocks, NUM_STEPS
            else:
                self.compute(name, blocks, transfer.error)
        self.forward()

    def begin(self, told: dict[str, Any]) -> None:
        blocks = self.pool.allocate(NUM_BLOCKS, owner=told["name"]).ids
        lease = kvxfer.LeaseToken.parse(told["lease"])
        notify = told["name"].encode()
        try:
            if self.remote is None:  # once: the session stays open
                self.remote = self.agent.connect_blocking(told["address"]).region_blocking("kv")
            transfer = self.agent.read(
                self.region, self.remote, told["blocks"], blocks, lease=lease, notify=notify
            )
        except kvxfer.KvxferError as error:  # nothing was posted
            self.compute(told["name"], blocks, error)
        else:
            self.reading[told["name"]] = transfer, blocks, told["digest"]

    def compute(self, name: str, blocks: NDArray[Any], error: kvxfer.KvxferError | None) -> None:
        print(f"decode: computes {name} itself: {error}", flush=True)
        self.running[name] = blocks, NUM_STEPS

    def forward(self) -> None:
        """Computes one token of each request that runs; a request ends with its last."""
        for name, (blocks, left) in list(self.running.items()):
            self.kv[:, :, blocks].astype(np.float32).sum()
            self.running[name] = blocks, left - 1
            if left == 1:
                del self.running[name]
                self.pool.free(blocks)
                self.num_over += 1
                # --8<-- [end:decode]


def digest(kv: NDArray[Any], blocks: NDArray[Any]) -> str:
    return hashlib.sha256(kv[:, :, blocks].tobytes()).hexdigest()


def run_prefill(router: Connection) -> None:
    Prefill(router).run()


def run_decode(router: Connection) -> None:
    engine = Decode(router)
    engine.run()
    assert engine.num_right == NUM_REQUESTS
    print(f"decode: {engine.num_right} requests ran to their last token, every byte right")


def main() -> bool:
    spawn = multiprocessing.get_context("spawn")  # a child that is forked cannot use its parent's agents
    ends = spawn.Pipe()
    processes = [
        spawn.Process(target=run, args=(end,), daemon=True)
        for run, end in zip((run_prefill, run_decode), ends, strict=True)
    ]
    for process, end in zip(processes, ends, strict=True):
        process.start()
        end.close()
    for process in processes:
        process.join()
    return all(process.exitcode == 0 for process in processes)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
