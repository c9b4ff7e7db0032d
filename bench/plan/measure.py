"""``kvxfer bench plan``: what it costs to compile a copy program and to post a transfer with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

import kvxfer
from kvxfer import plan as plans
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.option_checks import check_counts
from kvxfer.bench.run.progress import Progress
from kvxfer.bench.run.stats import median, spread

FIGURES = {
    "compile_ms": "layouts to copy program; once for each pair of layouts",
    "install_ms": "the program checked natively, and told to the peer",
    "first_post_ms": "the first transfer of a pair of regions: compiles, and tells the peer",
    "post_ms": "a later transfer: one call, with block tables alone",
    "post_pair_ms": "of it, what one source rank takes",
    "post_ns_per_page": "the same for each page that is named",
    "num_pages": "layers x keys and values x blocks",
    "num_loops": "strided loops of the program",
    "runs_per_pair": "contiguous runs of a pair of pages in one layer",
    "smallest_run_nbytes": "bytes of the shortest of them",
}

# Of a page: what is measured does not read it.
_TOKENS, _HEADS, _HEAD_DIM = 1, 1, 32
_CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Two caches of ``layers`` layers; ``blocks`` blocks are named, at random, of twice as many."""

    layers: int = 64
    blocks: int = 512
    iterations: int = 50
    seed: int = 1

    def __post_init__(self) -> None:
        check_counts(self, "layers", "blocks", "iterations")


def run(options: PlanOptions, progress: Callable[[Progress], None]) -> Message:
    """Runs it in this process, between two agents that are connected over shm; nothing moves."""
    shape = (options.layers, 2, 2 * options.blocks, _TOKENS, _HEADS, _HEAD_DIM)
    agent_options = kvxfer.AgentOptions(transports=("shm",))
    progress(Progress(0, options.iterations, "setting up two agents"))
    with kvxfer.Agent("source", agent_options) as source, kvxfer.Agent("destination", agent_options) as other:
        caches = [np.zeros(shape, np.uint16) for _ in range(2)]
        layouts = [kvxfer.KVLayout.from_tensor(cache, "l2bthd") for cache in caches]
        region = source.register("kv", caches[0], layouts[0])
        other.register("kv", caches[1], layouts[1])
        peer = source.connect_blocking(other.address, _CONNECT_TIMEOUT_S)
        remote = peer.region_blocking("kv", _CONNECT_TIMEOUT_S)
        compile_ns = []
        for _ in range(options.iterations):
            start_ns = time.perf_counter_ns()
            program = plans.compile_program(layouts[0], layouts[1])
            compile_ns.append(time.perf_counter_ns() - start_ns)
        random = np.random.default_rng(options.seed)
        post_ns = []
        for iteration in range(1 + options.iterations):
            progress(Progress(iteration, options.iterations, f"post {iteration}"))
            src, dst = (random.permutation(2 * options.blocks)[: options.blocks] for _ in range(2))
            src_blocks, dst_blocks = src.astype(np.uint32), dst.astype(np.uint32)
            start_ns = time.perf_counter_ns()
            transfer = source.write(region, remote, src_blocks, dst_blocks, notify=b"plan", hold=True)
            post_ns.append(time.perf_counter_ns() - start_ns)
            _end(transfer)
    num_pages = options.layers * 2 * options.blocks
    later_ns = post_ns[1:]
    return {
        "bench": "plan",
        **asdict(options),
        "compile_ms": spread(each / 1e6 for each in compile_ns),
        "first_post_ms": round(post_ns[0] / 1e6, 3),
        "post_ms": spread((each / 1e6 for each in later_ns), digits=4),
        "post_ns_per_page": median((each / num_pages for each in later_ns), digits=3),
        "num_pages": num_pages,
        "num_loops": len(program.loops),
        "verified": True,
    }


def _end(transfer: kvxfer.Transfer) -> None:
    """Nobody let it be written: it is the post that is measured."""
    transfer.cancel()
    try:
        transfer.wait(_CONNECT_TIMEOUT_S)
    except kvxfer.KvxferError:
        pass
