"""``kvxfer bench plan``: what it costs to compile a copy program and to post a transfer with it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
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
from kvxfer.bench.work.layout_pair import LayoutWork
from kvxfer.bench.work.models import NUM_KV, Shape

FIGURES = {
    "compile_ms": "compiles the copy program; once for each pair of layouts",
    "post_ms": "posts a later transfer: one call with block tables",
    "post_ns_per_page": "the same for each page of the transfer",
    "num_pages": "layers x (keys, values) x blocks of the destination",
}

_CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Compile the copy program of a pair of ranks, and post transfers with it.

    A request has --blocks blocks of the destination; it takes one post for each source rank that has a part
    of them.

    kvxfer bench plan --src-layout tp8 --dst-layout tp4
    """

    layers: Annotated[int, Option("Layers of both caches.", at_least=1)] = 64
    blocks: Annotated[
        int, Option("Blocks of one transfer, chosen at random from twice as many.", at_least=1)
    ] = 512
    iterations: Annotated[int, Option("How often to compile, and to post.", at_least=1)] = 50
    src_layout: SrcLayout = "tp1"
    dst_layout: DstLayout = "tp1"
    shape: Shape = "Llama-3.1-70B"
    seed: Seed = 1

    def __post_init__(self) -> None:
        check(self)
        self.work()

    def work(self) -> LayoutWork:
        """What layouts come to. Raises where nothing leads from one to the other."""
        src, dst = NamedLayout.parse(self.src_layout), NamedLayout.parse(self.dst_layout)
        page = math.lcm(src.block_tokens, dst.block_tokens)
        num_tokens = -(-self.blocks * dst.block_tokens // page) * page
        layouts = (self.src_layout, self.dst_layout, self.shape)
        return LayoutWork.of(*layouts, self.layers, num_tokens, self.seed, spare=2)


def run(options: PlanOptions, progress: Say) -> Message:
    """Runs it in this process and returns the result (`FIGURES`) as one JSON object; nothing moves."""
    return result_of("plan", options, lambda: _measure(options, progress))


def parts(result: Message) -> Iterator[Part]:
    """Yields what a result is shown as."""
    yield shown.arguments(result, *FIGURES)
    yield figures_table(result, FIGURES)


def _measure(options: PlanOptions, progress: Say) -> Message:
    work = options.work()
    # What is measured reads no byte of them.
    srcs = {src: spec.place(memory.reserve(spec.nbytes)) for src, spec in work.srcs.items()}
    dst = work.dst.place(memory.reserve(work.dst.nbytes))
    first = work.shares[0]
    progress(Progress(0, options.iterations, "setting up two agents"))
    agents = kvxfer.AgentOptions(transports=("shm",))
    with kvxfer.Agent("source", agents) as source, kvxfer.Agent("destination", agents) as other:
        regions = {src: source.register(f"rank{src}", one.memory, one.layout) for src, one in srcs.items()}
        other.register("kv", dst.memory, dst.layout)
        peer = source.connect_blocking(other.address, _CONNECT_TIMEOUT_S)
        remote = peer.region_blocking("kv", _CONNECT_TIMEOUT_S)
        compile_ns, post_ns = [], []
        for _ in range(options.iterations):
            start_ns = time.perf_counter_ns()
            plans.compile_program(srcs[first.src].layout, dst.layout, heads=first.heads)
            compile_ns.append(time.perf_counter_ns() - start_ns)
        random = np.random.default_rng(options.seed)
        for iteration in range(1 + options.iterations):
            progress(Progress(iteration, options.iterations, f"post {iteration}"))
            dst_blocks = _table(random, work.dst.num_blocks)
            tables = [_table(random, work.srcs[share.src].num_blocks) for share in work.shares]
            start_ns = time.perf_counter_ns()
            transfers = []
            for share, src_blocks in zip(work.shares, tables, strict=True):
                # One source that serves all is asked for all, as an engine does.
                several: dict[str, Any] = {"layers": share.layers, "heads": share.heads}
                wanted = several if len(work.shares) > 1 else {}
                region = regions[share.src]
                transfers.append(
                    source.write(region, remote, src_blocks, dst_blocks, notify=b"plan", hold=True, **wanted)
                )
            post_ns.append(time.perf_counter_ns() - start_ns)
            for transfer in transfers:
                _end(transfer)
    num_pages = options.layers * NUM_KV * options.blocks
    return {
        "num_tokens": work.num_tokens,
        "num_sources": len(work.srcs),
        "num_pages": num_pages,
        "compile_ms": spread(each / 1e6 for each in compile_ns),
        "post_ms": spread((each / 1e6 for each in post_ns[1:]), digits=4),
        "post_ns_per_page": median(each / num_pages for each in post_ns[1:]),
    }


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
