"""The pages of ``kvxfer bench pages``, written by NIXL: one number to stand beside ours.

Runs in an environment of its own, where ``nixl`` and numpy are installed and kvxfer need not be::

    python bench/baselines/nixl_pages.py --block-kib 32 --transport tcp --iterations 5

Two processes, 256 MiB in random pages on both sides, bytes verified after every iteration. Prints
one JSON object. NIXL's shared-memory path is cross-memory attach (UCX), so on one host its figure
is of the kind of ``--memory foreign``. Its progress thread is off unless ``--progress-thread``:
on two cores that is its faster setting, and the initiator polls.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection

import numpy as np


def _agent(name: str, progress_thread: bool):  # type: ignore[no-untyped-def]
    from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found]

    return nixl_agent(name, nixl_agent_config(enable_prog_thread=progress_thread, backends=["UCX"]))


def _target(pipe: Connection, nbytes: int, progress_thread: bool) -> None:
    agent = _agent("target", progress_thread)
    memory = np.zeros(nbytes, np.uint8)
    agent.register_memory([(memory.ctypes.data, nbytes, 0, "")], "DRAM")
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    while True:
        # Without its thread the target progresses only inside calls.
        while not pipe.poll(0):
            agent.get_new_notifs()
        command = pipe.recv()
        if command == "end":
            return
        dst, expected = command
        pages = memory.reshape(len(dst), -1)[dst]
        equal = bool(np.array_equal(pages[:, ::64], expected))
        memory[:] = 0  # before the answer: the next write may follow it at once
        pipe.send(equal)


def _measure(args: argparse.Namespace) -> dict[str, object]:
    block = args.block_kib * 1024
    count = args.total_mib * 1024 * 1024 // block
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    target = context.Process(target=_target, args=(theirs, count * block, args.progress_thread), daemon=True)
    target.start()
    agent = _agent("initiator", args.progress_thread)
    memory = np.random.default_rng(1).integers(0, 255, count * block, np.uint8)
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    metadata, address = pipe.recv()
    remote = agent.add_remote_agent(metadata)
    remote = remote.decode() if isinstance(remote, bytes) else remote
    random = np.random.default_rng(2)
    rates = []
    verified = True
    for iteration in range(args.iterations + 1):
        src, dst = random.permutation(count), random.permutation(count)

        def descriptors(base: int, order: np.ndarray) -> object:
            table = np.zeros((count, 3), np.uint64)
            table[:, 0] = base + order.astype(np.uint64) * block
            table[:, 1] = block
            return agent.get_xfer_descs(table, "DRAM")

        local, far = descriptors(memory.ctypes.data, src), descriptors(address, dst)
        handle = agent.initialize_xfer("WRITE", local, far, remote, b"done")
        begin = time.perf_counter()
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        seconds = time.perf_counter() - begin
        if state != "DONE":
            raise SystemExit(f"NIXL ended with {state}")
        agent.release_xfer_handle(handle)
        pipe.send((dst, memory.reshape(count, -1)[src][:, ::64]))
        verified = pipe.recv() and verified
        if iteration > 0:  # the first one warms up
            rates.append(memory.nbytes / seconds / 1e9)
    pipe.send("end")
    target.join()
    return {
        "bench": "nixl-pages",
        "transport": args.transport,
        "block_kib": args.block_kib,
        "progress_thread": args.progress_thread,
        "gb_per_s": {"min": min(rates), "median": statistics.median(rates), "max": max(rates)},
        "verified": verified,
    }


def main() -> None:
    """Measures once and prints the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--block-kib", type=int, default=32)
    parser.add_argument("--total-mib", type=int, default=256)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--transport", choices=("shm", "tcp"), default="shm")
    parser.add_argument("--progress-thread", action="store_true")
    args = parser.parse_args()
    os.environ["UCX_TLS"] = "tcp,self" if args.transport == "tcp" else "posix,sysv,cma,self,tcp"
    print(json.dumps(_measure(args)))


if __name__ == "__main__":
    main()
