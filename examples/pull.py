"""Decode pulls the KV pages of one request from prefill, and compares every byte.

    python pull.py                  # prefill and decode are processes; this one plays the router
    python pull.py --dies prefill   # prefill is killed when it has computed the request
    python pull.py --dies decode    # decode is killed before it reads

docs/tutorials/pull.md explains each step.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import sys
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvxfer

SHAPE = (4, 2, 64, 16, 8, 128)  # [layers, K and V, blocks, tokens, heads, dim]
BLOCK_NBYTES = 4 * 2 * 16 * 8 * 128 * 2  # one block in all layers, float16


# --8<-- [start:prefill]
def prefill(router: Connection, lease_s: float) -> None:
    with kvxfer.Pool(SHAPE[2], BLOCK_NBYTES) as pool, kvxfer.Agent("prefill-0") as agent:
        kv = pool.array(SHAPE, np.float16)
        region = agent.register("kv", kv, kvxfer.KVLayout.from_tensor(kv, axes="l2bthd"))

        blocks = pool.allocate(3, owner="req-42").ids
        kv[:, :, blocks] = np.random.default_rng().random((4, 2, 3, 16, 8, 128))  # the forward pass

        lease = region.grant("decode-0", blocks, mode="read", ttl_s=lease_s)
        router.send(
            {
                "address": agent.address,
                "blocks": blocks.tolist(),
                "lease": str(lease.token),
                "digest": digest(kv, blocks),
            }
        )
        try:
            agent.notification_blocking(timeout_s=lease_s)
            outcome = "decode has the pages"
        except TimeoutError:
            outcome = "decode did not read in time"
        lease.revoke_blocking()  # a fence: no read of these blocks is reported as done from here on
        pool.free(blocks)
        print(f"prefill: {outcome}; the blocks are free", flush=True)
        # --8<-- [end:prefill]


# --8<-- [start:decode]
def decode(router: Connection) -> None:
    with kvxfer.Pool(SHAPE[2], BLOCK_NBYTES) as pool, kvxfer.Agent("decode-0") as agent:
        kv = pool.array(SHAPE, np.float16)
        region = agent.register("kv", kv, kvxfer.KVLayout.from_tensor(kv, axes="l2bthd"))

        request = router.recv()
        blocks = pool.allocate(len(request["blocks"]), owner="req-42").ids
        try:
            peer = agent.connect_blocking(request["address"])
            transfer = agent.read(
                region,
                peer.region_blocking("kv"),
                src_blocks=request["blocks"],
                dst_blocks=blocks,
                lease=kvxfer.LeaseToken.parse(request["lease"]),
                notify=b"req-42",
                timeout_s=20,
            )
            transfer.wait()
        except kvxfer.KvxferError as error:
            print(f"decode: computes the prompt itself: {error}", flush=True)
        else:
            assert digest(kv, blocks) == request["digest"]
            print(f"decode: {len(blocks)} blocks came by {transfer.rails[0]}, every byte right", flush=True)
        pool.free(blocks)
        # --8<-- [end:decode]


def digest(kv: NDArray[Any], blocks: NDArray[Any]) -> str:
    return hashlib.sha256(kv[:, :, blocks].tobytes()).hexdigest()


# --8<-- [start:router]
def main(dies: str | None) -> bool:
    spawn = multiprocessing.get_context("spawn")  # a child that is forked cannot use its parent's agents
    to_prefill, of_prefill = spawn.Pipe()
    to_decode, of_decode = spawn.Pipe()
    processes = {
        "prefill": spawn.Process(target=prefill, args=(of_prefill, 2.0 if dies else 30.0), daemon=True),
        "decode": spawn.Process(target=decode, args=(of_decode,), daemon=True),
    }
    for process, end in zip(processes.values(), (of_prefill, of_decode), strict=True):
        process.start()
        end.close()
    request = to_prefill.recv()
    if dies:
        processes[dies].kill()
        processes[dies].join()
    if dies != "decode":
        to_decode.send(request)
    for process in processes.values():
        process.join()
    return all(process.exitcode == 0 for name, process in processes.items() if name != dies)
    # --8<-- [end:router]


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--dies", choices=("prefill", "decode"), help="this process is killed")
    sys.exit(0 if main(options.parse_args().dies) else 1)
