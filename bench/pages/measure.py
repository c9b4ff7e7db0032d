"""``kvxfer bench pages``: pages of one size, from one process to another, beside the limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from kvxfer.bench.errors import BenchError, CheckFailedError
from kvxfer.bench.pages.moves import WARMUP_ITERATIONS, check_moves, connect, judged, move
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.interrupt import Interrupt
from kvxfer.bench.run.limit import Limit, LimitSpec, limits_for
from kvxfer.bench.run.option_checks import check_counts
from kvxfer.bench.run.process import Worker, call_all
from kvxfer.bench.run.progress import Progress
from kvxfer.bench.run.stats import GIB, KIB, MIB, median, spread


@dataclass(frozen=True, slots=True)
class PagesOptions:
    """What is moved. A block is one page in each of ``layers`` layers."""

    transport: str = "shm"
    op: str = "write"
    total_mib: int = 256
    block_kib: int = 32
    pattern: str = "random"
    memory: str = "pool"
    iterations: int = 7
    layers: int = 1
    seed: int = 1
    timeout_s: float = 30.0
    #: Flips a byte after each arrival, so that the check must fail.
    corrupt: bool = False

    def __post_init__(self) -> None:
        check_moves(self)
        check_counts(self, "total_mib", "block_kib", "iterations", "layers")
        if self.num_blocks < 1:
            block = f"{self.layers} x {self.block_kib} KiB"
            raise BenchError(f"--total-mib {self.total_mib} holds no block of {block}")

    @property
    def page_nbytes(self) -> int:
        return self.block_kib * KIB

    @property
    def num_blocks(self) -> int:
        return self.total_mib * MIB // (self.page_nbytes * self.layers)

    @property
    def num_pages(self) -> int:
        return self.num_blocks * self.layers

    @property
    def total_nbytes(self) -> int:
        return self.num_pages * self.page_nbytes


def run(options: PagesOptions, progress: Callable[[Progress], None]) -> Message:
    """Runs it and returns the result as one JSON object; ``verified`` is false when a check failed.

    After Ctrl-C it is what was measured until then, with ``interrupted``.
    """
    described: Message = asdict(options)
    described.pop("corrupt")
    result: Message = {
        "bench": "pages",
        **described,
        "num_pages": options.num_pages,
        "total_nbytes": options.total_nbytes,
    }
    try:
        return {**result, **_measure(options, progress), "verified": True}
    except CheckFailedError as error:
        return {**result, "verified": False, "failure": str(error)}


def _measure(options: PagesOptions, progress: Callable[[Progress], None]) -> Message:
    total = options.iterations
    with (
        Interrupt() as interrupt,
        Worker("source", asdict(options)) as source,
        Worker("destination", asdict(options)) as destination,
    ):
        progress(Progress(0, total, "setting up two agents"))
        ready = call_all((source, destination), "open")
        connect(options.op, source, destination)
        spec = LimitSpec(
            limits_for(options.transport, options.memory),
            options.page_nbytes,
            options.num_pages,
            options.pattern,
            options.seed,
        )
        limit = Limit(spec, source, destination)
        moved = []
        for iteration in range(WARMUP_ITERATIONS + options.iterations):
            number = iteration - WARMUP_ITERATIONS
            if interrupt.stops(max(0, number)):
                break
            words = "warm-up" if number < 0 else f"iteration {number + 1}"
            progress(Progress(max(0, number), total, words))
            # The transfer goes first in every second iteration.
            if iteration % 2:
                limit.run(iteration)
            moved.append(_transfer(options, iteration, source, destination))
            if not iteration % 2:
                limit.run(iteration)
    measured = moved[WARMUP_ITERATIONS:]
    return {
        **({"interrupted": True} if len(measured) < options.iterations else {}),
        **_figures(options, measured, limit),
        "copy_kernel": ready[1]["copy_kernel"],
        "page_kind": ready[1]["page_kind"],
    }


def _transfer(options: PagesOptions, iteration: int, source: Worker, destination: Worker) -> Message:
    """Moves the pages once: fill and clear, move, check."""
    source.call("fill", iteration=iteration)
    destination.call("clear")
    told = {"iteration": iteration}
    active, passive = move(options.op, source, destination, write=told, read=told)
    checked = destination.call("check", iteration=iteration, corrupt=options.corrupt)
    return judged(options, iteration, active, passive, checked)


def _figures(options: PagesOptions, moved: list[Message], limit: Limit) -> dict[str, Any]:
    rates = [options.total_nbytes / one["total_ns"] for one in moved]
    reference, *others = limit.spec.names
    limit_rates = limit.rates(reference)[WARMUP_ITERATIONS:]
    figures: dict[str, Any] = {
        "total_ms": spread(one["total_ns"] / 1e6 for one in moved),
        "gb_per_s": spread(rates),
        "post_ms": median(one["post_ns"] / 1e6 for one in moved),
        "limit": {"name": reference, "gb_per_s": median(limit_rates)},
        "limit_ratio": median(mine / its for mine, its in zip(rates, limit_rates, strict=True)),
    }
    for name in others:
        # shared-copy-nt: what the same machine does with stores that bypass the caches.
        its_rates = limit.rates(name)[WARMUP_ITERATIONS:]
        figures["limit_nt"] = {"name": name, "gb_per_s": median(its_rates)}
        figures["limit_nt_ratio"] = median(mine / its for mine, its in zip(rates, its_rates, strict=True))
    cpu_s = [one["cpu_ns"] / 1e9 for one in moved]
    figures["cpu_s_per_gib"] = median(seconds * GIB / options.total_nbytes for seconds in cpu_s)
    figures["rails"] = moved[-1]["rails"]
    return figures
