"""Prefill pushes the KV pages of one request to decode, layer by layer while it computes.

    python push.py                  # prefill and decode are processes; a pipe stands for the router
    python push.py --dies prefill   # prefill is killed half-way through the layers
    python push.py --dies decode    # decode is killed when it has named its blocks

docs/tutorials/push.md explains each step.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvxfer

SHAPE = (4, 2, 64, 16, 8, 128)  # [layers, K and V, blocks, tokens, heads, dim]
BLOCK_NBYTES = 4 * 2 * 16 * 8 * 128 * 2  # one block in all layers, float16


# --8<-- [start:decode]
def decode(router: Connection, dies: str | None) -> None:
    with kvxfer.Pool(SHAPE[2], BLOCK_NBYTES) as pool, kvxfer.Agent("decode-0") as agent:
        kv = pool.array(SHAPE, np.float16)
        agent.register("kv", kv, kvxfer.KVLayout.from_tensor(kv, axes="l2bthd"))

        blocks = pool.allocate(3, owner="req-42").ids
        router.send({"address": agent.address, "blocks": blocks.tolist()})
        if dies == "decode":
            os.kill(os.getpid(), signal.SIGKILL)
        incoming = agent.expect(b"req-42", blocks, timeout_s=30)  # before or after prefill's write
        num_layers = 0
        try:
            for layer in incoming.layers:
                incoming.layer_blocking(layer)  # a model would compute its layer here
                num_layers += 1
            incoming.wait()
        except kvxfer.KvxferError as error:
            print(f"decode: computes the prompt itself, {num_layers} layers came: {error}", flush=True)
        else:
            assert digest(kv, blocks) == router.recv()
            print(f"decode: {num_layers} layers of {len(blocks)} blocks, every byte right", flush=True)
        pool.free(blocks)
        # --8<-- [end:decode]


# --8<-- [start:prefill]
def prefill(router: Connection, dies: str | None) -> None:
    with kvxfer.Pool(SHAPE[2], BLOCK_NBYTES) as pool, kvxfer.Agent("prefill-0") as agent:
        kv = pool.array(SHAPE, np.float16)
        region = agent.register("kv", kv, kvxfer.KVLayout.from_tensor(kv, axes="l2bthd"))

        request = router.recv()
        blocks = pool.allocate(len(request["blocks"]), owner="req-42").ids
        try:
            peer = agent.connect_blocking(request["address"])
            remote = peer.region_blocking("kv")
            transfer = agent.write(
                region, remote, blocks, request["blocks"], notify=b"req-42", hold=True, timeout_s=30
            )
            for layer in transfer.layers:
                kv[layer, :, blocks] = np.random.default_rng().random((3, 2, 16, 8, 128))  # computes it
                if dies == "prefill" and layer == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                transfer.mark_ready(layer + 1)
            transfer.wait()
            router.send(digest(kv, blocks))
        except kvxfer.KvxferError as error:
            print(f"prefill: the request is lost, its blocks are free: {error}", flush=True)
        else:
            print(f"prefill: decode has {len(blocks)} blocks; they are free here", flush=True)
        pool.free(blocks)
        # --8<-- [end:prefill]


def digest(kv: NDArray[Any], blocks: NDArray[Any]) -> str:
    return hashlib.sha256(kv[:, :, blocks].tobytes()).hexdigest()


def main(dies: str | None) -> bool:
    spawn = multiprocessing.get_context("spawn")  # a child that is forked cannot use its parent's agents
    ends = dict(zip(("prefill", "decode"), spawn.Pipe(), strict=True))
    processes = {
        "prefill": spawn.Process(target=prefill, args=(ends["prefill"], dies), daemon=True),
        "decode": spawn.Process(target=decode, args=(ends["decode"], dies), daemon=True),
    }
    for name, process in processes.items():
        process.start()
        ends[name].close()
    for process in processes.values():
        process.join()
    return all(process.exitcode == 0 for name, process in processes.items() if name != dies)


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--dies", choices=("prefill", "decode"), help="this process is killed")
    sys.exit(0 if main(options.parse_args().dies) else 1)
