"""``kvxfer bench plan --src-layout --dst-layout``: what it costs to get from one layout to another.

A program is compiled for a pair of ranks and told to the peer once; a request then is one post for each
source rank that serves a destination.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

import kvxfer
from kvxfer import plan as plans
from kvxfer.bench.run import memory
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.option_checks import check_counts, check_layouts
from kvxfer.bench.run.progress import Progress
from kvxfer.bench.run.stats import median, spread
from kvxfer.bench.work.layout_names import NamedLayout
from kvxfer.bench.work.layout_pair import LayoutWork
from kvxfer.session.program_cache import ProgramCache

_CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class LayoutPlanOptions:
    """A request names ``blocks`` blocks of the destination, at random, of twice as many."""

    src_layout: str
    dst_layout: str
    shape: str = "Llama-3.1-70B"
    layers: int = 64
    blocks: int = 512
    iterations: int = 50
    seed: int = 1

    def __post_init__(self) -> None:
        check_counts(self, "layers", "blocks", "iterations")
        check_layouts(self)
        _ = self.work

    @cached_property
    def work(self) -> LayoutWork:
        """What these options come to. Raises where nothing leads from one layout to the other."""
        src, dst = NamedLayout.parse(self.src_layout), NamedLayout.parse(self.dst_layout)
        page = math.lcm(src.block_tokens, dst.block_tokens)
        num_tokens = -(-self.blocks * dst.block_tokens // page) * page
        return LayoutWork.of(
            self.src_layout,
            self.dst_layout,
            self.shape,
            self.layers,
            num_tokens,
            "random",
            self.seed,
            spare=2,
        )


def run(options: LayoutPlanOptions, progress: Callable[[Progress], None]) -> Message:
    """Runs it in this process, between two agents that are connected over shm; nothing moves."""
    work = options.work
    agent_options = kvxfer.AgentOptions(transports=("shm",))
    progress(Progress(0, options.iterations, "setting up two agents"))
    with kvxfer.Agent("source", agent_options) as source, kvxfer.Agent("destination", agent_options) as other:
        regions = {}
        for src, spec in work.srcs.items():
            cache = spec.place(memory.reserve(spec.nbytes))
            regions[src] = source.register(f"rank{src}", cache.memory, cache.layout)
        target = work.dst.place(memory.reserve(work.dst.nbytes))
        other.register("kv", target.memory, target.layout)
        peer = source.connect_blocking(other.address, _CONNECT_TIMEOUT_S)
        remote = peer.region_blocking("kv", _CONNECT_TIMEOUT_S)
        first = work.shares[0]
        compile_ns, both_ns = [], []
        for _ in range(options.iterations):
            start_ns = time.perf_counter_ns()
            program = plans.compile_program(regions[first.src].layout, target.layout, heads=first.heads)
            compile_ns.append(time.perf_counter_ns() - start_ns)
        # A new cache of programs each time: the agent's own would know it.
        for _ in range(options.iterations):
            start_ns = time.perf_counter_ns()
            ProgramCache(source._core).get(peer.id, True, regions[first.src], remote, first.heads)
            both_ns.append(time.perf_counter_ns() - start_ns)
        random = np.random.default_rng(options.seed)
        post_ns, pair_ns = [], []
        for iteration in range(1 + options.iterations):
            progress(Progress(iteration, options.iterations, f"post {iteration}"))
            dst_blocks = _table(random, work.dst.num_blocks)
            tables = [_table(random, work.srcs[share.src].num_blocks) for share in work.shares]
            at_ns = [time.perf_counter_ns()]
            transfers = []
            for share, src_blocks in zip(work.shares, tables, strict=True):
                transfers.append(
                    source.write(
                        regions[share.src],
                        remote,
                        src_blocks,
                        dst_blocks,
                        layers=share.layers,
                        heads=share.heads,
                        notify=b"plan",
                        hold=True,
                    )
                )
                at_ns.append(time.perf_counter_ns())
            post_ns.append(at_ns[-1] - at_ns[0])
            pair_ns += [after - before for before, after in pairwise(at_ns)]
            for transfer in transfers:
                _end(transfer)
    return {
        "bench": "plan",
        **asdict(options),
        "num_tokens": work.num_tokens,
        "num_sources": len(work.srcs),
        "compile_ms": spread(each / 1e6 for each in compile_ns),
        "install_ms": median((both - alone) / 1e6 for both, alone in zip(both_ns, compile_ns, strict=True)),
        "first_post_ms": round(post_ns[0] / 1e6, 3),
        "post_ms": spread((each / 1e6 for each in post_ns[1:]), digits=4),
        "post_pair_ms": spread((each / 1e6 for each in pair_ns[len(work.shares) :]), digits=4),
        "num_loops": len(program.loops),
        "runs_per_pair": program.runs_per_pair,
        "smallest_run_nbytes": program.smallest_run_nbytes,
        "verified": True,
    }


def _table(random: np.random.Generator, num_blocks: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Returns half of the blocks, in random order."""
    return random.permutation(num_blocks)[: num_blocks // 2].astype(np.uint32)


def _end(transfer: kvxfer.Transfer) -> None:
    """Nobody let it be written: it is the post that is measured."""
    transfer.cancel()
    try:
        transfer.wait(_CONNECT_TIMEOUT_S)
    except kvxfer.KvxferError:
        pass
