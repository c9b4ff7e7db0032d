"""The work of a comparison, done by a baseline: the same as kvxfer's own benchmarks measure."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from kvxfer.bench.compare.baseline import Baseline, BaselinePair
from kvxfer.bench.errors import CheckFailedError
from kvxfer.bench.latency.measure import LatencyOptions, Ways
from kvxfer.bench.pages.measure import PagesOptions
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.counters import Counters, counted
from kvxfer.bench.run.process import Worker
from kvxfer.bench.run.stats import GIB, median, spread
from kvxfer.bench.setup.measure import FIGURES as SETUP_FIGURES
from kvxfer.bench.setup.measure import SetupOptions

# Longer than a transfer's own deadline: the process's error says more than its silence.
_SLACK_S = 10.0
# Some need tens of milliseconds a round trip. So a process reports before it counts as dead.
_ROUND_TRIPS_A_CALL = 100
# As in `bench setup`: a cache of four pages.
_SETUP_PAGE_NBYTES = 4096
_SETUP_NUM_PAGES = 4
_SETUP_TIMEOUT_S = 10.0


def run_pages(baseline: Baseline, options: PagesOptions, counters: Counters) -> Message:
    """Moves pages; the keys are those of `pages.measure.run`, and ``version`` and ``settings``."""
    sizes = (options.page_nbytes, options.num_pages)
    fields = _fields(options.transport, *sizes, options.timeout_s)
    moved = []
    with BaselinePair(baseline, fields, (options.seed, options.seed + 1)) as pair:
        pair.open(_active(pair, options.op))
        # The first one warms up: connections, prepared descriptors, page faults.
        for iteration in range(1 + options.iterations):
            if iteration == 1:
                counters.forget()
            moved.append(_move(pair, options.op, options.timeout_s, iteration, counters))
    del moved[0]
    return {
        **_identity(pair),
        "total_ms": spread(one["total_ns"] / 1e6 for one in moved),
        "gb_per_s": spread(options.total_nbytes / one["total_ns"] for one in moved),
        "post_ms": median(one["post_ns"] / 1e6 for one in moved),
        "cpu_s_per_gib": median(one["cpu_ns"] / 1e9 * GIB / options.total_nbytes for one in moved),
    }


def run_latency(baseline: Baseline, options: LatencyOptions, counters: Counters) -> Message:
    """Writes back and forth; the keys are those of `latency.measure.run`."""
    more = {"same_pages": True, "notifies": True}
    fields = _fields(options.transport, options.nbytes, 2, options.timeout_s, **more)
    iterations = options.warmup + options.iterations
    ways = Ways()
    with BaselinePair(baseline, fields, (1, 1)) as pair:
        pair.open(pair.source)
        starts = {options.warmup, *range(0, iterations, _ROUND_TRIPS_A_CALL)}
        for first, end in pairwise(sorted({*starts, iterations})):
            part: Message = {"first": first, "iterations": end - first}
            with counted(counters if first >= options.warmup else None, *pair.pids):
                pair.destination.call("answer", **part)  # from here on it polls; it replies again at the end
                asked = pair.source.call("ask", timeout_s=options.timeout_s + _SLACK_S, **part)
                answered = pair.destination.reply(options.timeout_s + _SLACK_S)
            for reply in (asked, answered):
                _raise_wrong(baseline, reply)
            ways.add(asked, answered)
    return {**_identity(pair), **ways.figures(skip=options.warmup)}


def run_setup(baseline: Baseline, options: SetupOptions) -> Message:
    """Sets two agents up, writes once, lets them idle; the keys are those of `setup.measure.run`."""
    sizes = (_SETUP_PAGE_NBYTES, _SETUP_NUM_PAGES)
    fields = _fields(options.transport, *sizes, _SETUP_TIMEOUT_S)
    seen: list[Message] = []
    for _ in range(options.iterations):
        with BaselinePair(baseline, fields, (1, 1)) as pair:
            pair.open(pair.source)
            written = _move(pair, "write", _SETUP_TIMEOUT_S, 1)
            pair.destination.send("idle", seconds=options.idle_s)
            idle = pair.source.call("idle", seconds=options.idle_s)
            pair.destination.reply(_SLACK_S)
        opened = {**pair.opened, "connect_ms": pair.connect_ms, "first_write_ms": written["total_ns"] / 1e6}
        seen.append({**opened, **idle})
    figures = {name: spread((one[name] for one in seen), digits=4) for name in SETUP_FIGURES}
    return {**_identity(pair), **figures}


def _fields(transport: str, page_nbytes: int, num_pages: int, timeout_s: float, **more: Any) -> Message:
    return {
        "transport": transport,
        "page_nbytes": page_nbytes,
        "num_pages": num_pages,
        "timeout_s": timeout_s,
        "same_pages": False,
        "notifies": False,
        **more,
    }


def _identity(pair: BaselinePair) -> Message:
    return {"version": pair.opened["version"], "settings": pair.opened["settings"]}


def _active(pair: BaselinePair, op: str) -> Worker:
    return pair.source if op == "write" else pair.destination


def _move(
    pair: BaselinePair, op: str, timeout_s: float, iteration: int, counters: Counters | None = None
) -> Message:
    """Moves the pages once: fill and clear, move, check."""
    active = _active(pair, op)
    passive = pair.destination if active is pair.source else pair.source
    pair.source.call("fill", iteration=iteration)
    pair.destination.call("clear")
    with counted(counters, *pair.pids):
        passive.call("serve")  # it replies again when it is told to stop
        moved = active.call("move", timeout_s=timeout_s + _SLACK_S, op=op, iteration=iteration)
        served = passive.call("served", timeout_s=_SLACK_S)
    _raise_wrong(pair.baseline, pair.destination.call("check", iteration=iteration), iteration)
    return {**moved, "cpu_ns": moved["cpu_ns"] + served["cpu_ns"]}


def _raise_wrong(baseline: Baseline, reply: Message, iteration: int | None = None) -> None:
    if reply["wrong"]:
        where = "" if iteration is None else f"iteration {iteration}: "
        raise CheckFailedError(f"{baseline.name}: {where}{reply['wrong']}")
