"""A prefill process with caches on a GPU, for test_agents.py; it reads commands line by line.

The peer reads ``pages``, which `pattern` fills, and writes ``target``. With the argument ``pool`` both lie in
memory of `kvxfer.gpu.shareable_memory`. Prints the agent's address, then an answer for each command.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import kvxfer
from kvxfer import _native
from kvxfer.gpu import shareable_memory

SHAPE = 3, 40, 65536  # layers, blocks, bytes of a page


def pattern(seed: int) -> Any:
    """Returns the bytes of all pages, uint8 of `SHAPE`, in host memory."""
    import torch

    return torch.randint(0, 256, SHAPE, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def main() -> None:
    import torch

    options = kvxfer.AgentOptions(transports=("shm", "cuda_ipc", "tcp"))
    with kvxfer.Agent("prefill", options) as agent:
        with shareable_memory() if sys.argv[1:] == ["pool"] else contextlib.nullcontext():
            pages = pattern(1).cuda()
            target = torch.zeros_like(pages)
        host = pattern(2).numpy()
        torch.cuda.synchronize()
        layout = kvxfer.KVLayout.from_tensor(pages, axes="lbd")
        regions = [
            agent.register("pages", pages, layout),
            agent.register("target", target, layout),
            agent.register("host", host, layout),
        ]
        print(agent.address, flush=True)
        peer = agent.accept_blocking(timeout_s=60)
        leases = [
            region.grant(peer, mode="write" if region.name == "target" else "read", ttl_s=300)
            for region in regions
        ]
        print("granted", flush=True)
        for command in sys.stdin:
            match command.split():
                case ["compare", seed]:
                    torch.cuda.synchronize()
                    print(int((target.cpu() != pattern(int(seed))).sum()), flush=True)
                case ["handles"]:
                    print(_native.gpu_pool_handles(0) or "torch's own", flush=True)
                case ["revoke"]:
                    leases[0].revoke_blocking()
                    pages.zero_()
                    torch.cuda.synchronize()
                    print("revoked", flush=True)
                case ["deregister"]:
                    regions[0].deregister_blocking()
                    print("deregistered", flush=True)


if __name__ == "__main__":
    main()
