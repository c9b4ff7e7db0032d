"""Two prefill ranks hand a request to one decode rank that lays its cache out in another way.

    python unequal_tp.py    # three processes; tensors of torch, or arrays of numpy where torch is missing

| | prefill, each of two ranks | decode, one rank |
| heads | 4 of 8 | all 8 |
| a page | 16 tokens | 64 tokens |
| order | tokens before heads | heads before tokens |

docs/tutorials/unequal-tp.md explains each step.
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection
from typing import Any

try:
    import torch as xp
except ImportError:
    import numpy as xp  # the same calls, with float16

import kvxfer
from kvxfer import plan

LAYERS, HEADS, DIM, TP, NUM_TOKENS = 4, 8, 128, 2, 150
DTYPE = getattr(xp, "bfloat16", xp.float16)


# --8<-- [start:layouts]
def prefill_cache(rank: int) -> tuple[Any, kvxfer.KVLayout]:
    kv = xp.zeros(
        (LAYERS, 2, 32, 16, HEADS // TP, DIM), dtype=DTYPE
    )  # [layers, 2, blocks, tokens, heads, dim]
    first = rank * HEADS // TP
    return kv, kvxfer.KVLayout.from_tensor(kv, axes="l2bthd", first_head=first, total_heads=HEADS)


def decode_cache() -> tuple[Any, kvxfer.KVLayout]:
    kv = xp.zeros((LAYERS, 2, 8, HEADS, 64, DIM), dtype=DTYPE)  # [layers, 2, blocks, heads, tokens, dim]
    return kv, kvxfer.KVLayout.from_tensor(kv, axes="l2bhtd")
    # --8<-- [end:layouts]


# --8<-- [start:prefill]
def prefill(router: Connection, rank: int) -> None:
    kv, layout = prefill_cache(rank)
    blocks = [9, 4, 7, 30, 1, 2, 11, 12, 25, 26]  # 10 pages of 16 tokens; the last is full in part
    heads = tokens_of_prompt()[:, :, :, layout.first_head : layout.first_head + layout.num_heads]
    for page, block in enumerate(blocks):
        part = heads[:, :, page * 16 : page * 16 + 16]
        kv[:, :, block, : part.shape[2]] = part

    with kvxfer.Agent(f"prefill/{rank}") as agent:
        region = agent.register("kv", kv, layout)
        with region.grant("decode/0", blocks, mode="read", ttl_s=30) as lease:
            router.send({"address": agent.address, "blocks": blocks, "lease": str(lease.token)})
            agent.notification_blocking(timeout_s=30)
            # --8<-- [end:prefill]


# --8<-- [start:decode]
def decode(routers: list[Connection]) -> None:
    kv, layout = decode_cache()
    blocks = [5, 0, 3]  # 3 pages of 64 tokens
    with kvxfer.Agent("decode/0") as agent:
        region = agent.register("kv", kv, layout)
        told = [router.recv() for router in routers]
        remotes = [agent.connect_blocking(rank["address"]).region_blocking("kv") for rank in told]
        reads = []
        for share in plan.route([remote.layout for remote in remotes], [layout]):
            rank = told[share.src]
            lease = kvxfer.LeaseToken.parse(rank["lease"])
            reads.append(
                agent.read(
                    region,
                    remotes[share.src],
                    rank["blocks"],
                    blocks,
                    heads=share.heads,
                    tokens=range(NUM_TOKENS),
                    lease=lease,
                    notify=b"req-42",
                )
            )
        kvxfer.Group(reads).wait(timeout_s=30)

    # [layers, 2, pages, heads, tokens, dim] to [layers, 2, tokens, heads, dim]
    pages = xp.moveaxis(kv[:, :, blocks], 3, 4).reshape(LAYERS, 2, 3 * 64, HEADS, DIM)
    assert bool((pages[:, :, :NUM_TOKENS] == tokens_of_prompt()).all())
    assert not bool(pages[:, :, NUM_TOKENS:].any())  # no token more
    print(f"decode: {NUM_TOKENS} tokens of {HEADS} heads from {TP} ranks, in {kv.dtype}, every element right")
    # --8<-- [end:decode]


def tokens_of_prompt() -> Any:
    """Returns what the model computes of the prompt: [layers, 2, tokens, heads, dim]."""
    num = LAYERS * 2 * NUM_TOKENS * HEADS * DIM
    return (xp.arange(num) % 251).reshape(LAYERS, 2, NUM_TOKENS, HEADS, DIM)  # exact in bfloat16


def main() -> bool:
    spawn = multiprocessing.get_context("spawn")  # a child that is forked cannot use its parent's agents
    pipes = [spawn.Pipe() for _ in range(TP)]
    processes = [
        spawn.Process(target=prefill, args=(end, rank), daemon=True) for rank, (end, _) in enumerate(pipes)
    ]
    processes.append(spawn.Process(target=decode, args=([end for _, end in pipes],), daemon=True))
    for process in processes:
        process.start()
    for pipe in pipes:
        for end in pipe:
            end.close()
    for process in processes:
        process.join()
    return all(process.exitcode == 0 for process in processes)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
