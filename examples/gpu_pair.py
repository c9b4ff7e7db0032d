"""Prefill pushes pages from its GPU to decode's GPU, and neither host waits for a kernel or a copy.

    python gpu_pair.py    # needs a GPU, torch for CUDA, and kvxfer[gpu]

Both processes use GPU 0. docs/tutorials/gpu-pair.md explains each step, and says what of this has run.
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch

import kvxfer

SHAPE = (4, 2, 64, 16, 8, 128)  # [layers, K and V, blocks, tokens, heads, dim]
OPTIONS = kvxfer.AgentOptions(transports=("shm", "cuda_ipc", "tcp"))


# --8<-- [start:cache]
def new_cache() -> tuple[torch.Tensor, kvxfer.KVLayout]:
    with kvxfer.gpu.shareable_memory():  # which peers of this machine can map
        kv = torch.zeros(SHAPE, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()  # pages that arrive do not wait for the stream that fills it with zeros
    return kv, kvxfer.KVLayout.from_tensor(kv, axes="l2bthd")
    # --8<-- [end:cache]


# --8<-- [start:prefill]
def prefill(router: Connection) -> None:
    kv, layout = new_cache()
    blocks = [7, 9, 30]
    with kvxfer.Agent("prefill-0", OPTIONS) as agent:
        region = agent.register("kv", kv, layout)
        request = router.recv()
        remote = agent.connect_blocking(request["address"]).region_blocking("kv")

        kv[:, :, blocks] = computed().to("cuda", non_blocking=True)  # the forward pass, enqueued
        transfer = agent.write(
            region,
            remote,
            blocks,
            request["blocks"],
            after=torch.cuda.current_stream(),  # the first byte waits for what is enqueued by now
            notify=b"req-42",
            timeout_s=30,
        )
        transfer.wait()  # decode has every byte; until then the blocks stay as they are
        print(f"prefill: decode has {len(blocks)} blocks; they are free here", flush=True)
        # --8<-- [end:prefill]


# --8<-- [start:decode]
def decode(router: Connection) -> None:
    kv, layout = new_cache()
    blocks = [3, 4, 0]
    # Done before a stream waits: allocations and first launches may wait for the whole device.
    index = torch.tensor(blocks, device="cuda")
    seen = torch.empty((4, 2, 3, 16, 8, 128), dtype=torch.bfloat16, device="cuda")
    torch.index_select(kv[0], 1, index, out=seen[0])
    torch.cuda.synchronize()
    with kvxfer.Agent("decode-0", OPTIONS) as agent:
        agent.register("kv", kv, layout)
        incoming = agent.expect(b"req-42", blocks, timeout_s=60)
        router.send({"address": agent.address, "blocks": blocks})

        stream = torch.cuda.current_stream()
        for layer in incoming.layers:
            incoming.wait_in(stream, layer)  # the stream waits for this layer, and the host goes on
            torch.index_select(kv[layer], 1, index, out=seen[layer])  # the model's layer, enqueued
        incoming.wait()  # raises what has failed: the stream goes on in any case
        torch.cuda.synchronize()
        assert torch.equal(seen.cpu(), computed())
        print(f"decode: {len(blocks)} blocks came by {incoming.rails[0]}, every element right", flush=True)
        # --8<-- [end:decode]


def computed() -> torch.Tensor:
    """Returns what the model computes of the prompt: [layers, 2, blocks, tokens, heads, dim]."""
    generator = torch.Generator().manual_seed(42)
    return torch.rand((4, 2, 3, 16, 8, 128), generator=generator).to(torch.bfloat16)


def main() -> bool:
    spawn = multiprocessing.get_context("spawn")
    ends = spawn.Pipe()
    processes: list[Any] = [
        spawn.Process(target=run, args=(end,), daemon=True)
        for run, end in zip((prefill, decode), ends, strict=True)
    ]
    for process, end in zip(processes, ends, strict=True):
        process.start()
        end.close()
    for process in processes:
        process.join()
    return all(process.exitcode == 0 for process in processes)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
