"""``kvxfer bench handover``: the pages of real requests, from a prefill process to a decode process."""

from __future__ import annotations

import socket
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import psutil

from kvxfer.bench.handover.stages import Handover, summarize
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.course import Progress, Say, result_of
from kvxfer.bench.run.limit import Limit, LimitSpec, limits_for
from kvxfer.bench.run.options import REPLY_TIMEOUT_S, Corrupt, Option, Seed, Timeout, check
from kvxfer.bench.run.perftest import Device, device_of, require_device
from kvxfer.bench.run.process import Worker, call_all, receive_any
from kvxfer.bench.run.stats import GIB, MIB
from kvxfer.bench.work import trace as traces
from kvxfer.bench.work.models import MODELS, ModelShape, model
from kvxfer.bench.work.trace import Requests, Trace

# The limit is measured before, between and after this many parts of the run, while nothing moves.
_PARTS = 4
_LIMIT_NBYTES = 256 * MIB


@dataclass(frozen=True, slots=True)
class HandoverOptions:
    """Push the pages of real requests from a prefill process to a decode process.

    Each layer moves as soon as it is computed. Both processes together need memory for about 2 x max-tokens
    tokens, and at most half a GiB for the limit.

    kvxfer bench handover --transport tcp --details

    kvxfer bench handover --trace my_requests.jsonl --out results
    """

    model: Annotated[str, Option(f"The model whose cache is moved: {', '.join(MODELS)}.")] = "Llama-3.1-8B"
    transport: Annotated[
        str,
        Option(
            "The transport: shm, tcp, verbs, ucx, libfabric.",
            one_of=("shm", "tcp", "verbs", "ucx", "libfabric"),
        ),
    ] = "shm"
    device: Device = ""
    trace: Trace = traces.SAMPLE
    requests: Requests = 24
    max_tokens: Annotated[
        int, Option("Tokens of the longest request; all lengths are scaled to it.", at_least=1)
    ] = 2048
    prefill_ms_per_layer: Annotated[
        float,
        Option("Time that prefill takes for each layer; 0: as fast as possible.", at_least=0, value="MS"),
    ] = 5.0
    seed: Seed = 1
    timeout_s: Timeout = 30.0
    corrupt: Corrupt = False

    def __post_init__(self) -> None:
        check(self)
        require_device(self.transport, self.device)
        self.shape()

    def shape(self) -> ModelShape:
        return model(self.model)


def run(options: HandoverOptions, progress: Say) -> Message:
    """Runs it and returns the result as one JSON object."""
    shape = options.shape()
    requests = traces.scale(traces.read_trace(options.trace), options.requests, options.max_tokens)
    lengths = [request.input_tokens for request in requests]
    return result_of(
        "handover",
        options,
        lambda: _measure(options, lengths, progress),
        model_source=shape.source,
        tokens=sum(lengths),
        page_nbytes=shape.page_nbytes,
        block_nbytes=shape.block_nbytes,
    )


def _measure(options: HandoverOptions, lengths: list[int], progress: Say) -> Message:
    fields, total = asdict(options), len(lengths)
    ours, theirs = socket.socketpair()
    handovers: list[Handover] = []
    with (
        ours,
        theirs,
        Worker("handover.prefill:Prefill", fields, "prefill", [ours]) as prefill,
        Worker("handover.decode:Decode", fields, "decode", [theirs]) as decode,
    ):
        # An end is to see the other one gone: they alone hold the channel.
        ours.close()
        theirs.close()
        workers = (prefill, decode)
        progress(Progress(0, total, "setting up two agents"))
        opened = call_all(workers, "open")
        prefill.call("connect", address=decode.call("address")["address"])
        decode.call("accept")
        limit = _limit(options, lengths, prefill, decode)
        limit.run(0)
        requests = [{"request": index, "tokens": tokens} for index, tokens in enumerate(lengths)]
        for part in range(_PARTS):
            taken = requests[part * total // _PARTS : (part + 1) * total // _PARTS]
            if taken:
                handovers += _run_part(prefill, decode, taken, total, progress)
                limit.run(part + 1)
        cpu_s = sum(one["cpu_ns"] for one in call_all(workers, "usage")) / 1e9
        rss = {one.role: round(psutil.Process(one.pid).memory_info().rss / MIB, 1) for one in workers}
    figures: Message = summarize(handovers, limit)
    return {
        **figures,
        "num_pages": figures["total_nbytes"] // options.shape().page_nbytes,
        "cpu_s_per_gib": round(cpu_s * GIB / figures["total_nbytes"], 3),
        "rss_mib": rss,
        **{name: opened[-1][name] for name in ("copy_kernel", "page_kind")},
    }


def _limit(options: HandoverOptions, lengths: list[int], prefill: Worker, decode: Worker) -> Limit:
    """The same pages as a plain copy or stream: a median request's, within 256 MiB."""
    shape = options.shape()
    nbytes = shape.blocks_for(sorted(lengths)[len(lengths) // 2]) * shape.block_nbytes
    num_pages = min(nbytes, _LIMIT_NBYTES) // shape.page_nbytes
    names = limits_for(options.transport, "pool")
    device = device_of(options.transport, options.device)
    limit = Limit(LimitSpec(names, shape.page_nbytes, num_pages, options.seed, device), prefill, decode)
    limit.run(0)  # warm-up
    limit.forget()
    return limit


def _run_part(
    prefill: Worker, decode: Worker, requests: list[Message], total: int, progress: Say
) -> list[Handover]:
    """Hands over some of the requests; returns what both ends saw of each."""
    workers = (prefill, decode)
    for worker in workers:
        worker.send("run", requests=requests)
    first = requests[0]["request"]
    seen: dict[int, dict[str, Any]] = {asked["request"]: {} for asked in requests}
    running = len(workers)
    while running:
        worker, message = receive_any(workers, REPLY_TIMEOUT_S)
        if message["kind"] == "reply":
            running -= 1
            continue
        seen[message["request"]][worker.role] = message
        if worker is decode:
            done = first + sum("decode" in ends for ends in seen.values())
            progress(Progress(done, total, f"request {message['request']}: {message['words']}"))
    return [Handover.of(ends["prefill"], ends["decode"]) for ends in seen.values()]
