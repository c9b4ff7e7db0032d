"""Decode pulls many requests at once, each in a task of its own, on one event loop.

    python inside_asyncio.py    # prefill and decode are processes, each with one event loop

Prefill says by a message of the session that a request is ready; no router stands between the two.
docs/tutorials/inside-asyncio.md explains each step.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvxfer

SHAPE = (4, 2, 64, 16, 8, 128)  # [layers, K and V, blocks, tokens, heads, dim]
BLOCK_NBYTES = 4 * 2 * 16 * 8 * 128 * 2  # one block in all layers, float16
NUM_REQUESTS, NUM_BLOCKS = 12, 4


# --8<-- [start:prefill]
async def prefill(address: str) -> None:
    with kvxfer.Pool(SHAPE[2], BLOCK_NBYTES) as pool:
        kv = pool.array(SHAPE, np.float16)
        async with kvxfer.Agent("prefill-0") as agent:
            region = agent.register("kv", kv, kvxfer.KVLayout.from_tensor(kv, axes="l2bthd"))
            peer = await agent.connect(address)

            async def serve(name: str) -> None:
                blocks = pool.allocate(NUM_BLOCKS, owner=name).ids
                kv[:, :, blocks] = np.random.default_rng().random((4, 2, NUM_BLOCKS, 16, 8, 128))
                async with region.grant(peer, blocks, mode="read", ttl_s=30) as lease:
                    ready = {"name": name, "blocks": blocks.tolist(), "lease": str(lease.token)}
                    await peer.sendable()
                    peer.send(json.dumps({**ready, "digest": digest(kv, blocks)}).encode())
                    await fetched[name].wait()
                pool.free(blocks)  # the lease is revoked

            names = [f"req-{number}" for number in range(NUM_REQUESTS)]
            fetched = {name: asyncio.Event() for name in names}
            async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
                for name in names:
                    tasks.create_task(serve(name))
                for _ in names:
                    note = await agent.notification()
                    fetched[note.payload.decode()].set()
            print(
                f"prefill: {NUM_REQUESTS} requests were fetched, {pool.num_free} blocks are free", flush=True
            )
            # --8<-- [end:prefill]


# --8<-- [start:decode]
async def decode(told: Connection) -> None:
    with kvxfer.Pool(SHAPE[2], BLOCK_NBYTES) as pool:
        kv = pool.array(SHAPE, np.float16)
        async with kvxfer.Agent("decode-0") as agent:
            region = agent.register("kv", kv, kvxfer.KVLayout.from_tensor(kv, axes="l2bthd"))
            told.send(agent.address)

            async def fetch(peer: kvxfer.Peer, ready: dict[str, Any]) -> None:
                blocks = pool.allocate(NUM_BLOCKS, owner=ready["name"]).ids
                transfer = agent.read(
                    region,
                    await peer.region("kv"),
                    ready["blocks"],
                    blocks,
                    lease=kvxfer.LeaseToken.parse(ready["lease"]),
                    notify=ready["name"].encode(),
                )
                try:
                    for layer in transfer.layers:
                        await transfer.layer(layer)  # other requests go on meanwhile
                    await transfer
                    assert digest(kv, blocks) == ready["digest"]
                except asyncio.CancelledError:  # which ends the waiting, and not the transfer
                    transfer.cancel()
                    with suppress(kvxfer.KvxferError):
                        await transfer
                    raise
                finally:
                    pool.free(blocks)  # the transfer has ended

            async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
                for _ in range(NUM_REQUESTS):
                    message = await agent.message()
                    tasks.create_task(fetch(message.peer, json.loads(message.payload)))
            print(f"decode: {NUM_REQUESTS} requests came, every byte right", flush=True)
            # --8<-- [end:decode]


def digest(kv: NDArray[Any], blocks: NDArray[Any]) -> str:
    return hashlib.sha256(kv[:, :, blocks].tobytes()).hexdigest()


def run_prefill(told: Connection) -> None:
    asyncio.run(prefill(told.recv()))


def run_decode(told: Connection) -> None:
    asyncio.run(decode(told))


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
