"""``kvxfer bench pages --src-layout --dst-layout``: one rank's cache from ranks that hold it otherwise.

Beside it, in the same run and over the same transport, kvxfer copies as many bytes between two equal
caches: what remains is what the difference of the layouts costs. So do the shortest code that can
(bench/run/limit.py) and, over tcp, a message for each contiguous piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from kvxfer.bench.errors import BenchError, CheckFailedError
from kvxfer.bench.pages.moves import WARMUP_ITERATIONS, check_moves, connect, judged, move
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.interrupt import Interrupt
from kvxfer.bench.run.limit import Limit, LimitSpec, limits_for, loopback_stream
from kvxfer.bench.run.option_checks import check_counts, check_layouts
from kvxfer.bench.run.process import Worker, call_all
from kvxfer.bench.run.progress import Progress
from kvxfer.bench.run.stats import GIB, MIB, median, spread
from kvxfer.bench.work.layout_pair import LayoutWork

_MOVED, _PLAIN = "moved", "plain"


@dataclass(frozen=True)
class LayoutPagesOptions:
    """What is moved: the sequence of one destination rank. ``layers`` 0 takes what fits of the model's."""

    src_layout: str
    dst_layout: str
    shape: str = "Llama-3.1-70B"
    transport: str = "shm"
    op: str = "write"
    total_mib: int = 256
    pattern: str = "random"
    memory: str = "pool"
    iterations: int = 7
    layers: int = 0
    seed: int = 1
    timeout_s: float = 30.0
    #: Flips a bit of an element after each arrival, so that the check must fail.
    corrupt: bool = False

    def __post_init__(self) -> None:
        check_moves(self)
        check_counts(self, "total_mib", "iterations")
        if self.layers < 0:
            raise BenchError(f"--layers is at least 1, not {self.layers}")
        check_layouts(self)
        _ = self.work

    @cached_property
    def work(self) -> LayoutWork:
        """What these options come to. Raises where nothing leads from one layout to the other."""
        return LayoutWork.sized(
            self.src_layout,
            self.dst_layout,
            self.shape,
            self.total_mib * MIB,
            self.layers,
            self.pattern,
            self.seed,
        )


def run(options: LayoutPagesOptions, progress: Callable[[Progress], None]) -> Message:
    """Runs it and returns the result as one JSON object; ``verified`` is false when a check failed.

    Keys beside the options: ``num_tokens``, ``layers`` (of the model, at both ends), ``num_sources``;
    ``src_nbytes`` and ``dst_nbytes``, of the elements that move; ``runs_per_pair``,
    ``smallest_run_nbytes`` and ``explain``, as `kvxfer.plan.CopyProgram` has them. All rates count bytes
    at the source: ``gb_per_s`` {min, median, max}; ``plain_gb_s``, of a copy of as many bytes between
    two caches like the destination's, and ``ratio_to_plain``; ``limit`` {name, gb_per_s}, as without
    layouts, on pages of that cache's size, and ``limit_ratio``; over tcp also ``piecewise_gb_s``, of
    ``piecewise_pieces`` messages of a piece each (the first ``piecewise_layers`` layers and
    ``piecewise_tokens`` tokens, ``piecewise_nbytes``), and ``ratio_to_piecewise``. Ratios are medians
    over iterations. ``total_ms``, ``post_ms``, ``cpu_s_per_gib`` and ``rails`` as without layouts.
    After Ctrl-C it is what was measured until then, with ``interrupted``.
    """
    described: Message = asdict(options)
    described.pop("corrupt")
    result: Message = {"bench": "pages", **described, **options.work.described()}
    try:
        return {**result, **_measure(options, progress), "verified": True}
    except CheckFailedError as error:
        return {**result, "verified": False, "failure": str(error)}


def _measure(options: LayoutPagesOptions, progress: Callable[[Progress], None]) -> Message:
    total = options.iterations
    with (
        Interrupt() as interrupt,
        Worker("layout-source", asdict(options)) as source,
        Worker("layout-destination", asdict(options)) as destination,
    ):
        progress(Progress(0, total, "setting up two agents"))
        ready = call_all((source, destination), "open")
        connect(options.op, source, destination)
        source.call("fill")
        pieces = _Piecewise(source, destination) if options.transport == "tcp" else None
        limit = Limit(_limit_of(options), source, destination)
        moved: dict[str, list[Message]] = {_MOVED: [], _PLAIN: []}
        for iteration in range(WARMUP_ITERATIONS + options.iterations):
            number = iteration - WARMUP_ITERATIONS
            if interrupt.stops(max(0, number)):
                break
            progress(Progress(max(0, number), total, "warm-up" if number < 0 else f"iteration {number + 1}"))
            # Each goes first in every second iteration.
            for what in (_MOVED, _PLAIN) if iteration % 2 else (_PLAIN, _MOVED):
                moved[what].append(_transfer(options, what, iteration, source, destination))
            if pieces is not None:
                pieces.run(check=number < 0)
            limit.run(iteration)
    measured = {what: those[WARMUP_ITERATIONS:] for what, those in moved.items()}
    done = len(measured[_MOVED])
    return {
        **({"interrupted": True} if done < options.iterations else {}),
        **_figures(options.work.src_nbytes, measured),
        **_limit_figures(options.work.src_nbytes, measured[_MOVED], limit),
        **(pieces.figures(options.work.src_nbytes, measured[_MOVED]) if pieces is not None else {}),
        "copy_kernel": ready[1]["copy_kernel"],
        "page_kind": ready[1]["page_kind"],
    }


def _limit_of(options: LayoutPagesOptions) -> LimitSpec:
    """Returns the limit on as many bytes in pages of the plain copy's size."""
    name, *_ = limits_for(options.transport, options.memory)
    page_nbytes = options.work.plain.page_nbytes
    num_pages = max(1, options.work.src_nbytes // page_nbytes)
    return LimitSpec((name,), page_nbytes, num_pages, options.pattern, options.seed)


def _limit_figures(src_nbytes: int, moved: list[Message], limit: Limit) -> Message:
    (name,) = limit.spec.names
    rates = limit.rates(name)[WARMUP_ITERATIONS:]
    mine = [src_nbytes / one["total_ns"] for one in moved]
    return {
        "limit": {"name": name, "gb_per_s": median(rates)},
        "limit_ratio": median(my / its for my, its in zip(mine, rates, strict=True)),
    }


class _Piecewise:
    """The coordinator's view of the same bytes sent piece by piece."""

    def __init__(self, source: Worker, destination: Worker) -> None:
        self._source, self._destination = source, destination
        ours, theirs = loopback_stream()
        with ours, theirs:
            self.described = source.call("pieces", descriptors=(ours.fileno(),))
            self.described.pop("kind")
            destination.call(
                "pieces", descriptors=(theirs.fileno(),), stream_nbytes=self.described.pop("stream_nbytes")
            )
        self._elapsed_ns: list[int] = []

    def run(self, check: bool) -> None:
        """Moves them once, and keeps the time."""
        self._destination.call("clear", what=_PLAIN)
        self._destination.channel.send("recv_pieces")
        start_ns = self._source.call("send_pieces")["start_ns"]
        self._elapsed_ns.append(self._destination.reply()["end_ns"] - start_ns)
        if not check:
            return
        part = {name: self.described[name] for name in ("layers", "tokens")}
        if wrong := self._destination.call("check_pieces", **part)["wrong"]:
            raise CheckFailedError(f"sending piece by piece itself moved wrong bytes: {wrong}")

    def figures(self, src_nbytes: int, moved: list[Message]) -> Message:
        """Returns its rate, and how many times faster the transfers beside it were."""
        rates = [self.described["nbytes"] / each for each in self._elapsed_ns[WARMUP_ITERATIONS:]]
        mine = [src_nbytes / one["total_ns"] for one in moved]
        return {
            "piecewise_gb_s": median(rates),
            "ratio_to_piecewise": median(my / its for my, its in zip(mine, rates, strict=True)),
            **{f"piecewise_{name}": value for name, value in self.described.items()},
        }


def _transfer(
    options: LayoutPagesOptions, what: str, iteration: int, source: Worker, destination: Worker
) -> Message:
    """Moves the sequence once: clear, move, check."""
    destination.call("clear", what=what)
    written, read = {"what": what, "iteration": iteration}, {"what": what}
    active, passive = move(options.op, source, destination, write=written, read=read)
    # Every byte once, then a layer of each transfer: the rest would take longer than the moving.
    layers = options.work.dst.layers
    layer = layers[iteration % len(layers)] if iteration >= WARMUP_ITERATIONS else -1
    checked = destination.call("check", what=what, layer=layer, corrupt=options.corrupt)
    return judged(options, iteration, active, passive, checked)


def _figures(src_nbytes: int, measured: dict[str, list[Message]]) -> dict[str, Any]:
    moved, plain = measured[_MOVED], measured[_PLAIN]
    rates = [src_nbytes / one["total_ns"] for one in moved]
    plain_rates = [src_nbytes / one["total_ns"] for one in plain]
    cpu_s = [one["cpu_ns"] / 1e9 for one in moved]
    return {
        "total_ms": spread(one["total_ns"] / 1e6 for one in moved),
        "gb_per_s": spread(rates),
        "post_ms": median(one["post_ns"] / 1e6 for one in moved),
        "plain_gb_s": median(plain_rates),
        "ratio_to_plain": median(mine / its for mine, its in zip(rates, plain_rates, strict=True)),
        "cpu_s_per_gib": median(seconds * GIB / src_nbytes for seconds in cpu_s),
        "rails": moved[-1]["rails"],
    }
