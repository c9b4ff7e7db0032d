"""``kvxfer bench handover``: the pages of real requests, from a prefill process to a decode process."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Annotated, Any

import psutil

from kvxfer.bench.errors import BenchError
from kvxfer.bench.handover.stages import Handover, summarize
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.course import Interrupt, Progress, Say, result_of
from kvxfer.bench.run.limit import Limit, LimitSpec, limits_for
from kvxfer.bench.run.options import REPLY_TIMEOUT_S, Corrupt, Option, Seed, Timeout, check
from kvxfer.bench.run.process import Worker, call_all, receive_any
from kvxfer.bench.run.stats import GIB, MIB, percentiles
from kvxfer.bench.work import trace as traces
from kvxfer.bench.work.models import MODELS, ModelShape, model
from kvxfer.bench.work.trace import Arrivals, Rate, Requests, Speedup, Trace, TraceRequest

# The limit is measured before, between and after this many parts of the run, while nothing moves.
_PARTS = 4
# Longest requests whose blocks decode keeps with prefix reuse: 1 GiB for the default model.
_REUSED_REQUESTS = 4
_LIMIT_NBYTES = 256 * MIB


@dataclass(frozen=True, slots=True)
class HandoverOptions:
    """Hand the pages of real requests from a prefill process to a decode process.

    Requests arrive as room for them comes (closed), at --rate a second with exponential gaps (poisson), or
    as in the trace, --speedup times faster (trace). More than --concurrency at once at a decode process
    wait; the wait is measured. The memory of both processes together is about 2 x concurrency x max-tokens
    tokens, and half a GiB at most for the limit; prefix reuse keeps four requests more at decode.
    """

    model: Annotated[str, Option(", ".join(MODELS))] = "Llama-3.1-8B"
    transport: Annotated[str, Option("shm, tcp", one_of=("shm", "tcp"))] = "shm"
    trace: Trace = "mooncake"
    requests: Requests = 24
    max_tokens: Annotated[int, Option("Lengths are scaled so that the longest fits.", at_least=1)] = 2048
    prefill_ms_per_layer: Annotated[float, Option("Pace of prefill; 0: as fast as it can.", at_least=0)] = 5.0
    mode: Annotated[
        str,
        Option(
            "push: layers go as they finish; pull: decode reads when prefill has ended.",
            one_of=("push", "pull"),
        ),
    ] = "push"
    concurrency: Annotated[int, Option("Requests in hand at once.", at_least=1)] = 1
    tp: Annotated[int, Option("Tensor-parallel ranks; one rank's slice moves.", at_least=1)] = 1
    seed: Seed = 1
    timeout_s: Timeout = 30.0
    arrivals: Arrivals = "closed"
    rate: Rate = 2.0
    speedup: Speedup = 1.0
    prefix_reuse: Annotated[bool, Option("Blocks that decode holds from earlier requests do not move.")] = (
        False
    )
    prefills: Annotated[int, Option("Prefill processes; requests go to them in turn.", at_least=1)] = 1
    decodes: Annotated[int, Option("Decode processes, each with --concurrency.", at_least=1)] = 1
    corrupt: Corrupt = False

    def __post_init__(self) -> None:
        check(self)
        shape = self.shape()
        if self.prefix_reuse and len(shape.groups) > 1:
            raise BenchError(
                f"--prefix-reuse is for models whose layers all attend to every token, unlike {self.model}: "
                "what is outside a window or in a state cannot be used again block by block"
            )

    def shape(self) -> ModelShape:
        return model(self.model, self.tp)

    def num_blocks(self) -> list[int]:
        """Blocks of each end's pools, one for each group of layers: what all requests in hand can need."""
        return [self.concurrency * group.most_blocks(self.max_tokens) for group in self.shape().groups]

    def reuse_blocks(self) -> int:
        """Blocks that decode keeps for requests to come."""
        return _REUSED_REQUESTS * self.shape().blocks_for(self.max_tokens) if self.prefix_reuse else 0

    def chunk_blocks(self, scale: float) -> int:
        """Blocks of one prefix id of the trace, whose lengths were multiplied by ``scale``."""
        return max(1, int(traces.PREFIX_TOKENS * scale) // self.shape().tokens_per_block)


def run(options: HandoverOptions, progress: Say, seen: list[Handover] | None = None) -> Message:
    """Runs it and returns the result as one JSON object.

    ``seen`` receives every request's handover, in the order of the trace. After Ctrl-C the quarter of
    the run that is under way ends, and the result is what was measured, with ``interrupted``.
    """
    shape = options.shape()
    read = traces.read_trace(traces.find_trace(options.trace))
    requests = traces.scale(read, options.requests, options.max_tokens)
    if options.prefix_reuse and not any(request.prefix_ids for request in requests):
        raise BenchError(
            f"--prefix-reuse needs prefix ids, and {options.trace} has none: use the trace mooncake or one "
            "of its format"
        )
    chunk_blocks = options.chunk_blocks(traces.scale_of(read, options.requests, options.max_tokens))
    asked = _asked(options, requests, chunk_blocks)
    handovers = seen if seen is not None else []
    return result_of(
        "handover",
        options,
        lambda: _measure(options, shape, asked, progress, handovers),
        model_source=shape.source,
        tokens=sum(request.input_tokens for request in requests),
        page_nbytes=shape.page_nbytes,
        block_nbytes=shape.block_nbytes,
    )


def _measure(
    options: HandoverOptions,
    shape: ModelShape,
    requests: list[Message],
    progress: Say,
    handovers: list[Handover],
) -> Message:
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        prefills, decodes = _start(options, stack)
        workers = (*prefills, *decodes)
        prefill, decode = prefills[0], decodes[0]
        words = "two agents" if len(workers) == 2 else f"{len(workers)} agents"
        progress(Progress(0, len(requests), f"setting up {words}"))
        opened = call_all(workers, "open")
        # The one that posts reaches out: prefill writes, decode reads.
        active, passive = (prefills, decodes) if options.mode == "push" else (decodes, prefills)
        for one in passive:
            address = one.call("address")["address"]
            for other in active:
                other.call("connect", address=address)
                one.call("accept")
        limit = _limit(options, shape, requests, prefill, decode)
        limit.run(0)
        # Arrivals on a clock cannot stop for a limit between them.
        num_parts = _PARTS if options.arrivals == "closed" else 1
        for part in range(num_parts):
            taken = range(part * len(requests) // num_parts, (part + 1) * len(requests) // num_parts)
            if interrupt.stops(len(handovers)):
                break
            if taken:
                handovers += _run_part(
                    prefills, decodes, requests[taken.start : taken.stop], len(requests), progress
                )
                limit.run(part + 1)
        ended = call_all(workers, "usage")
        rss_mib = [round(psutil.Process(one.pid).memory_info().rss / MIB, 1) for one in workers]
    total_nbytes = sum(handover.nbytes for handover in handovers)
    figures: Message = summarize(handovers, limit)
    if interrupt.asked and len(handovers) < len(requests):
        figures["interrupted"] = True
        figures["requests"] = len(handovers)
    if options.arrivals != "closed":
        figures["queue_ms"] = percentiles(one.queue_ms() for one in handovers)
        figures["arrival_to_decode_ms"] = percentiles(one.arrival_to_decode_ms() for one in handovers)
    cpu_s = sum(one["cpu_ns"] for one in ended) / 1e9
    figures["cpu_s_per_gib"] = round(cpu_s * GIB / total_nbytes, 3)
    # The largest process of each kind.
    figures["rss_mib"] = {"prefill": max(rss_mib[: len(prefills)]), "decode": max(rss_mib[len(prefills) :])}
    return {**figures, **{name: opened[-1][name] for name in ("copy_kernel", "page_kind")}}


def _start(options: HandoverOptions, stack: ExitStack) -> tuple[list[Worker], list[Worker]]:
    """Starts the processes, with a channel between every prefill and every decode."""
    pairs = [[socket.socketpair() for _ in range(options.decodes)] for _ in range(options.prefills)]
    fields = asdict(options)

    def start(role: str, index: int, peers: list[socket.socket]) -> Worker:
        end = f"handover.{role}:{role.capitalize()}"
        return stack.enter_context(Worker(end, {**fields, "index": index}, role, peers))

    try:
        prefills = [start("prefill", index, [ours for ours, _ in row]) for index, row in enumerate(pairs)]
        decodes = [
            start("decode", index, [row[index][1] for row in pairs]) for index in range(options.decodes)
        ]
    finally:
        for stream in (stream for row in pairs for pair in row for stream in pair):
            stream.close()
    return prefills, decodes


def _limit(
    options: HandoverOptions, shape: ModelShape, requests: list[Message], prefill: Worker, decode: Worker
) -> Limit:
    """The same pages as a plain copy or stream: a median request's, within 256 MiB."""
    lengths = sorted(request["tokens"] for request in requests)
    # A state counts as pages, too: the limit moves as many bytes.
    num_pages = shape.request_nbytes(lengths[len(lengths) // 2]) // shape.page_nbytes
    spec = LimitSpec(
        limits_for(options.transport, "pool"),
        shape.page_nbytes,
        max(1, min(num_pages, _LIMIT_NBYTES // shape.page_nbytes)),
        "random",
        options.seed,
    )
    limit = Limit(spec, prefill, decode)
    limit.run(0)  # warm-up
    limit.forget()
    return limit


def _asked(options: HandoverOptions, requests: list[TraceRequest], chunk_blocks: int) -> list[Message]:
    """Returns the requests as the workers get them; ``arrival_ns`` is None where they arrive on demand."""
    arrivals_s = traces.arrivals_s(options, requests)
    return [
        {
            "request": index,
            "tokens": request.input_tokens,
            "prefix_ids": request.prefix_ids if options.prefix_reuse else (),
            "chunk_blocks": chunk_blocks,
            # In turn, and over all pairs of processes.
            "decode": index % options.decodes,
            "prefill": index // options.decodes % options.prefills,
            "arrival_ns": None if arrival_s is None else int(arrival_s * 1e9),
        }
        for index, (request, arrival_s) in enumerate(zip(requests, arrivals_s, strict=True))
    ]


def _run_part(
    prefills: list[Worker], decodes: list[Worker], requests: list[Message], total: int, progress: Say
) -> list[Handover]:
    """Hands over some of the requests; returns what both ends saw of each."""
    workers = (*prefills, *decodes)
    for role, those in (("prefill", prefills), ("decode", decodes)):
        for index, worker in enumerate(those):
            worker.send("run", requests=[asked for asked in requests if asked[role] == index])
    first = requests[0]["request"]
    seen: dict[int, dict[str, Any]] = {asked["request"]: {} for asked in requests}
    arrivals_ns = [0, *(asked["arrival_ns"] or 0 for asked in requests)]
    longest_gap_s = max(after - before for before, after in pairwise(arrivals_ns)) / 1e9
    running = len(workers)
    while running:
        worker, message = receive_any(workers, REPLY_TIMEOUT_S + longest_gap_s)
        if message["kind"] == "reply":
            running -= 1
        elif message["kind"] == "request":
            seen[message["request"]][worker.role] = message
            if worker in decodes:
                done = first + sum("decode" in ends for ends in seen.values())
                progress(Progress(done, total, f"request {message['request']}: {message['words']}"))
    return [
        Handover.of(ends["prefill"], ends["decode"])
        for asked, ends in zip(requests, seen.values(), strict=True)
    ]
