"""``kvxfer bench plan``: what it costs to compile a copy program and to post a transfer with it.

A program is compiled for a pair of ranks and told to the peer once; a request then is one post for each
source rank that serves a destination.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import numpy as np

import kvxfer
from kvxfer import plan as plans
from kvxfer.bench.pages.measure import DstLayout, SrcLayout
from kvxfer.bench.report import shown
from kvxfer.bench.report.document import Part, figures_table
from kvxfer.bench.run import memory
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.course import Progress, Say, result_of
from kvxfer.bench.run.options import Option, Seed, check
from kvxfer.bench.run.stats import median, spread
from kvxfer.bench.work.layout_names import NamedLayout
from kvxfer.bench.work.layout_pair import LayoutWork, check_layouts
from kvxfer.bench.work.models import Shape
from kvxfer.session.program_cache import ProgramCache

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
    """Compile the copy program of two layouts, and post transfers with it.

    With --src-layout and --dst-layout, the program of one pair of ranks, and a request of as many blocks
    of the destination: one post for each source rank.
    """

    layers: Annotated[int, Option("Of both caches.", at_least=1)] = 64
    blocks: Annotated[int, Option("Named by one transfer, at random, of twice as many.", at_least=1)] = 512
    iterations: Annotated[int, Option("Of compiling, and of posting.", at_least=1)] = 50
    src_layout: SrcLayout = ""
    dst_layout: DstLayout = ""
    shape: Shape = "Llama-3.1-70B"
    seed: Seed = 1

    def __post_init__(self) -> None:
        check(self)
        if self.has_layouts:
            check_layouts(self)
            self.work()

    @property
    def has_layouts(self) -> bool:
        return bool(self.src_layout or self.dst_layout)

    def work(self) -> LayoutWork:
        """What layouts come to. Raises where nothing leads from one to the other."""
        src, dst = NamedLayout.parse(self.src_layout), NamedLayout.parse(self.dst_layout)
        page = math.lcm(src.block_tokens, dst.block_tokens)
        num_tokens = -(-self.blocks * dst.block_tokens // page) * page
        layouts = (self.src_layout, self.dst_layout, self.shape)
        return LayoutWork.of(*layouts, self.layers, num_tokens, "random", self.seed, spare=2)


@dataclass(frozen=True, slots=True)
class _Source:
    """A source rank: its cache, how many blocks it has, and what of it a request takes."""

    cache: Any
    layout: kvxfer.KVLayout
    num_blocks: int
    selected: dict[str, range]


def run(options: PlanOptions, progress: Say) -> Message:
    """Runs it in this process and returns the result (`FIGURES`) as one JSON object; nothing moves."""
    result = result_of("plan", options, lambda: _measure(options, progress))
    without = () if options.has_layouts else ("src_layout", "dst_layout", "shape")
    return {name: value for name, value in result.items() if name not in without}


def parts(result: Message) -> Iterator[Part]:
    """Yields what a result is shown as."""
    yield shown.arguments(result, *FIGURES)
    yield figures_table(result, FIGURES)


def _measure(options: PlanOptions, progress: Say) -> Message:
    sources, (target, target_layout, num_blocks), known = _caches(options)
    first = sources[0]
    progress(Progress(0, options.iterations, "setting up two agents"))
    agents = kvxfer.AgentOptions(transports=("shm",))
    with kvxfer.Agent("source", agents) as source, kvxfer.Agent("destination", agents) as other:
        regions = [source.register(f"rank{n}", each.cache, each.layout) for n, each in enumerate(sources)]
        other.register("kv", target, target_layout)
        peer = source.connect_blocking(other.address, _CONNECT_TIMEOUT_S)
        remote = peer.region_blocking("kv", _CONNECT_TIMEOUT_S)
        heads = first.selected.get("heads")
        compile_ns, both_ns = [], []
        for _ in range(options.iterations):
            start_ns = time.perf_counter_ns()
            program = plans.compile_program(first.layout, target_layout, heads=heads)
            compile_ns.append(time.perf_counter_ns() - start_ns)
        # A new cache of programs each time: the agent's own would know it.
        for _ in range(options.iterations if options.has_layouts else 0):
            start_ns = time.perf_counter_ns()
            ProgramCache(source._core).get(peer.id, True, regions[0], remote, heads)
            both_ns.append(time.perf_counter_ns() - start_ns)
        random = np.random.default_rng(options.seed)
        post_ns, pair_ns = [], []
        for iteration in range(1 + options.iterations):
            progress(Progress(iteration, options.iterations, f"post {iteration}"))
            dst_blocks = _table(random, num_blocks)
            tables = [_table(random, each.num_blocks) for each in sources]
            at_ns = [time.perf_counter_ns()]
            transfers = []
            for each, region, src_blocks in zip(sources, regions, tables, strict=True):
                wanted: dict[str, Any] = {**each.selected, "notify": b"plan", "hold": True}
                transfers.append(source.write(region, remote, src_blocks, dst_blocks, **wanted))
                at_ns.append(time.perf_counter_ns())
            post_ns.append(at_ns[-1] - at_ns[0])
            pair_ns += [after - before for before, after in pairwise(at_ns)]
            for transfer in transfers:
                _end(transfer)
    figures: Message = {
        **known,
        "compile_ms": spread(each / 1e6 for each in compile_ns),
        "first_post_ms": round(post_ns[0] / 1e6, 3),
        "post_ms": spread((each / 1e6 for each in post_ns[1:]), digits=4),
        "num_loops": len(program.loops),
    }
    if not options.has_layouts:
        per_page = (each / known["num_pages"] for each in post_ns[1:])
        return {**figures, "post_ns_per_page": median(per_page)}
    installed = zip(both_ns, compile_ns, strict=True)
    return {
        **figures,
        "install_ms": median((both - alone) / 1e6 for both, alone in installed),
        "post_pair_ms": spread((each / 1e6 for each in pair_ns[len(sources) :]), digits=4),
        "runs_per_pair": program.runs_per_pair,
        "smallest_run_nbytes": program.smallest_run_nbytes,
    }


def _caches(options: PlanOptions) -> tuple[list[_Source], tuple[Any, kvxfer.KVLayout, int], Message]:
    """Returns the sources, the target with its layout and number of blocks, and what a result says of it."""
    if not options.has_layouts:
        shape = (options.layers, 2, 2 * options.blocks, _TOKENS, _HEADS, _HEAD_DIM)
        caches = [np.zeros(shape, np.uint16) for _ in range(2)]
        layout, target = (kvxfer.KVLayout.from_tensor(cache, "l2bthd") for cache in caches)
        count = 2 * options.blocks
        known = {"num_pages": options.layers * 2 * options.blocks}
        return [_Source(caches[0], layout, count, {})], (caches[1], target, count), known
    work = options.work()
    placed = {src: spec.place(memory.reserve(spec.nbytes)) for src, spec in work.srcs.items()}
    sources = [
        _Source(
            placed[share.src].memory,
            placed[share.src].layout,
            work.srcs[share.src].num_blocks,
            {"layers": share.layers, "heads": share.heads},
        )
        for share in work.shares
    ]
    dst = work.dst.place(memory.reserve(work.dst.nbytes))
    known = {"num_tokens": work.num_tokens, "num_sources": len(work.srcs)}
    return sources, (dst.memory, dst.layout, work.dst.num_blocks), known


def _table(random: np.random.Generator, num_blocks: int) -> Any:
    """Returns half of the blocks, in random order."""
    return random.permutation(num_blocks)[: num_blocks // 2].astype(np.uint32)


def _end(transfer: kvxfer.Transfer) -> None:
    """Nobody let it be written: it is the post that is measured."""
    transfer.cancel()
    try:
        transfer.wait(_CONNECT_TIMEOUT_S)
    except kvxfer.KvxferError:
        pass
