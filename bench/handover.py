"""``kvxfer bench handover``: the pages of real requests, from a prefill process to a decode process."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from kvxfer.bench import trace as traces
from kvxfer.bench.channel import Message
from kvxfer.bench.errors import BenchError, CheckFailedError
from kvxfer.bench.limit import Limit, LimitSpec, limits_for, pages_within
from kvxfer.bench.models import ModelShape, model
from kvxfer.bench.process import REPLY_TIMEOUT_S, Worker, call_all, check_timeout, receive_any
from kvxfer.bench.progress import Progress
from kvxfer.bench.stages import Handover, summarize
from kvxfer.bench.stats import GIB, MIB
from kvxfer.bench.trace import TraceRequest

TRANSPORTS = ("shm", "tcp")
MODES = ("push", "pull")

# The limit is measured before, between and after this many parts of the run, while nothing moves.
_PARTS = 4


@dataclass(frozen=True, slots=True)
class HandoverOptions:
    """What is handed over, and at which pace.

    The memory of both processes together is about ``2 * concurrency * max_tokens`` tokens, and half
    a GiB at most for the limit: 1.1 GiB for the defaults, 3.4 GiB for the largest model at a
    concurrency of 2.
    """

    model: str = "Llama-3.1-8B"
    transport: str = "shm"
    trace: str = "mooncake"
    requests: int = 24
    max_tokens: int = 2048
    prefill_ms_per_layer: float = 5.0
    mode: str = "push"
    concurrency: int = 1
    tp: int = 1
    seed: int = 1
    timeout_s: float = 30.0
    #: Flips a byte of the last request after its arrival, so that the check must fail.
    corrupt: bool = False

    def __post_init__(self) -> None:
        for name, known in (("transport", TRANSPORTS), ("mode", MODES)):
            if getattr(self, name) not in known:
                raise BenchError(f"unknown --{name} {getattr(self, name)!r}; known are {', '.join(known)}")
        for name in ("requests", "max_tokens", "concurrency"):
            if getattr(self, name) < 1:
                raise BenchError(f"--{name.replace('_', '-')} is at least 1, not {getattr(self, name)}")
        if self.prefill_ms_per_layer < 0:
            raise BenchError(f"--prefill-ms-per-layer is not negative, unlike {self.prefill_ms_per_layer}")
        check_timeout(self.timeout_s)
        self.shape()

    def shape(self) -> ModelShape:
        return model(self.model, self.tp)

    def num_blocks(self) -> int:
        """Blocks of each end's pool: as many as all requests in flight can need."""
        return self.concurrency * self.shape().blocks_for(self.max_tokens)


def run(options: HandoverOptions, progress: Callable[[Progress], None]) -> Message:
    """Runs it and returns the result as one JSON object; ``verified`` is false when a check failed."""
    shape = options.shape()
    requests = traces.scale(
        traces.read_trace(traces.find_trace(options.trace)), options.requests, options.max_tokens
    )
    described: Message = asdict(options)
    described.pop("corrupt")
    result: Message = {
        "bench": "handover",
        **described,
        "model_source": shape.source,
        "tokens": sum(request.input_tokens for request in requests),
        "page_nbytes": shape.page_nbytes,
        "block_nbytes": shape.block_nbytes,
    }
    try:
        return {**result, **_measure(options, shape, requests, progress), "verified": True}
    except CheckFailedError as error:
        return {**result, "verified": False, "failure": str(error)}


def _measure(
    options: HandoverOptions,
    shape: ModelShape,
    requests: list[TraceRequest],
    progress: Callable[[Progress], None],
) -> Message:
    prefill_end, decode_end = socket.socketpair()
    with (
        prefill_end,
        decode_end,
        Worker("prefill", asdict(options), prefill_end) as prefill,
        Worker("decode", asdict(options), decode_end) as decode,
    ):
        prefill_end.close()
        decode_end.close()
        workers = (prefill, decode)
        progress(Progress(0, len(requests), "setting up two agents"))
        opened = call_all(workers, "open")
        # The one that posts reaches out: prefill writes, decode reads.
        active, passive = workers if options.mode == "push" else (decode, prefill)
        active.call("connect", address=passive.call("address")["address"])
        passive.call("accept")
        limit = _limit(options, shape, requests, prefill, decode)
        limit.run(0)
        handovers: list[Handover] = []
        for part in range(_PARTS):
            taken = range(part * len(requests) // _PARTS, (part + 1) * len(requests) // _PARTS)
            if taken:
                handovers += _run_part(workers, taken, requests, progress)
                limit.run(part + 1)
        ended = call_all(workers, "usage")
    total_nbytes = sum(handover.nbytes for handover in handovers)
    figures: Message = summarize(handovers, shape, limit)
    cpu_s = sum(one["cpu_ns"] for one in ended) / 1e9
    figures["cpu_s_per_gib"] = round(cpu_s * GIB / total_nbytes, 3)
    figures["rss_mib"] = {"prefill": ended[0]["rss_mib"], "decode": ended[1]["rss_mib"]}
    figures["copy_kernel"] = opened[1]["copy_kernel"]
    figures["page_kind"] = opened[1]["page_kind"]
    return figures


def _limit(
    options: HandoverOptions,
    shape: ModelShape,
    requests: list[TraceRequest],
    prefill: Worker,
    decode: Worker,
) -> Limit:
    """The same pages as a plain copy or stream: a median request's, within 256 MiB."""
    lengths = sorted(request.input_tokens for request in requests)
    num_pages = shape.blocks_for(lengths[len(lengths) // 2]) * shape.num_layers * shape.num_kv
    spec = LimitSpec(
        limits_for(options.transport, "pool"),
        shape.page_nbytes,
        pages_within(shape.page_nbytes, num_pages, 256 * MIB),
        "random",
        options.seed,
    )
    limit = Limit(spec, prefill, decode)
    limit.run(0)  # warm-up
    limit.forget()
    return limit


def _run_part(
    workers: tuple[Worker, Worker],
    taken: range,
    requests: list[TraceRequest],
    progress: Callable[[Progress], None],
) -> list[Handover]:
    """Hands over some of the requests; returns what both ends saw of each."""
    decode = workers[1]
    described = [{"request": index, "tokens": requests[index].input_tokens} for index in taken]
    for worker in workers:
        worker.channel.send("run", requests=described)
    seen: dict[int, dict[str, Any]] = {index: {} for index in taken}
    running = 2
    while running:
        worker, message = receive_any(workers, REPLY_TIMEOUT_S)
        if message["kind"] == "reply":
            running -= 1
        elif message["kind"] == "request":
            seen[message["request"]][worker.role] = message
            if worker is decode:
                done = taken.start + sum("decode" in ends for ends in seen.values())
                progress(Progress(done, len(requests), f"request {message['request']}: {message['words']}"))
    return [
        Handover.of(index, requests[index].input_tokens, ends["prefill"], ends["decode"])
        for index, ends in seen.items()
    ]
