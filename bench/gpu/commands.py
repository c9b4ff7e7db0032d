"""What a kernel waits for a transfer that it starts itself, by a command in a ring."""

from __future__ import annotations

from typing import Any

import numpy as np

import kvxfer
from kvxfer.bench.errors import CheckFailedError
from kvxfer.bench.latency.delays import Delay
from kvxfer.gpu import include_path, shareable_memory

_PAGE_NBYTES = 16 * 1024
_TIMEOUT_S = 60.0

#: One thread, which starts one command after the other and looks at its clock.
CODE = """
#include "kvxfer/device.cuh"
__device__ unsigned long long now_ns() {
  unsigned long long ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}
extern "C" __global__ void time_commands(kvxfer::CommandRing* ring, unsigned prepared, unsigned num_rounds,
                                         unsigned ended, unsigned long long* posted_ns,
                                         unsigned long long* ended_ns) {
  for (unsigned round = 0; round < num_rounds; ++round) {
    const unsigned long long began = now_ns();
    if (!kvxfer::start(ring, prepared, 0)) return;
    posted_ns[round] = now_ns() - began;
    if (!kvxfer::wait_until_ended(ring, ended + round + 1, 10000000)) return;
    ended_ns[round] = now_ns() - began;
  }
}
"""


def compiled(code: str, entry: str, capability: tuple[int, int]) -> Any:
    """Returns a kernel that includes kvxfer's headers, as its author compiles it."""
    from cuda.core import Program, ProgramOptions

    major, minor = capability
    options = ProgramOptions(arch=f"sm_{major}{minor}", include_path=[include_path()])
    return Program(code, "c++", options).compile("cubin").get_kernel(entry)


def by_kernel(gpu: int, rounds: int) -> list[Delay]:
    """Returns percentiles of posting a command, and of its end as the kernel sees it, by an agent that spins.

    A page of 16 KiB, from one place on the GPU to another over cuda_ipc. The clock is the device's, which
    some devices tick in steps of a microsecond.
    """
    import torch
    from cuda.core import Device, LaunchConfig, launch

    device = Device(gpu)
    device.set_current()
    kernel = compiled(CODE, "time_commands", torch.cuda.get_device_capability(gpu))
    options = kvxfer.AgentOptions(
        listen="tcp://127.0.0.1:0", transports=("cuda_ipc",), gpu=gpu, spin_us=20_000
    )
    with kvxfer.Agent("src", options) as src, kvxfer.Agent("dst", options) as dst:
        # Which this process may map once more; what cudaMalloc made only another one may open.
        with shareable_memory(gpu):
            pages = [
                torch.zeros((2, _PAGE_NBYTES), dtype=torch.uint8, device=f"cuda:{gpu}") for _ in range(2)
            ]
        torch.cuda.synchronize(gpu)
        region, target = src.register("kv", pages[0]), dst.register("kv", pages[1])
        there = src.connect_blocking(dst.address, _TIMEOUT_S)
        target.grant(dst.accept_blocking("src", _TIMEOUT_S), None, "write", ttl_s=_TIMEOUT_S)
        with src.command_ring() as ring:
            prepared = ring.prepare_write(region, there.region_blocking("kv", _TIMEOUT_S), [0], [1])
            times: Any = torch.zeros((2, rounds), dtype=torch.int64, device=f"cuda:{gpu}")
            for count in (rounds // 10, rounds):
                launch(
                    device.create_stream(torch.cuda.current_stream(gpu)),
                    LaunchConfig(grid=1, block=1),
                    kernel,
                    ring.address,
                    np.uint32(prepared.number),
                    np.uint32(count),
                    np.uint32(ring.num_ended),
                    times[0].data_ptr(),
                    times[1].data_ptr(),
                )
                torch.cuda.synchronize(gpu)
            for failure in ring.take_failures():
                raise CheckFailedError(f"a command of a kernel failed: {failure.error}")
            posted, ended = times.cpu().numpy() / 1e3
    if not ended.all():
        raise CheckFailedError("a kernel waited in vain for the end of its command")
    return [Delay.of("start()", 0.0, posted), Delay.of("start() to its end", 0.0, ended)]
