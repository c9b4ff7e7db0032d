"""``kvxfer bench scale``: what grows with transfers in flight, regions, peers, and prefills at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import psutil

from kvxfer.bench.errors import CheckFailedError
from kvxfer.bench.report import shown
from kvxfer.bench.report.document import Part, Table, Words, number
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.course import Progress, Say, result_of
from kvxfer.bench.run.options import Option, Seed, check
from kvxfer.bench.run.process import Worker, call_all
from kvxfer.bench.run.stats import KIB, MIB, median

PAGE_NBYTES = 32 * KIB
# Where it is not bytes that are to be moved.
_SMALL_PAGES = 64
#: what -> how many of it, at most.
SERIES = {"transfers": 10_000, "regions": 1_000, "peers": 200, "prefills": 16}
#: series -> its columns -> what they mean.
COLUMNS = {
    "transfers": {
        "post_us": "one post",
        "each_us": "a transfer of one page, from the first post to the last end, divided",
    },
    "regions": {
        "register_us": "one more region",
        "connect_ms": "a new peer, which learns of all",
        "transfer_us": "one page to one of them and back to idle",
    },
    "peers": {
        "connect_ms": "one more peer",
        "transfer_us": "one page from one of them, while the others are idle",
        "idle_cpu_cores": "of the agent with all of them",
        "rss_kib": "of the agent, for each",
    },
    "prefills": {
        "gb_per_s": "of all that write into one decode at once",
        "fairness": "Jain's index of their rates: 1 where all are equal, 1/n where one has all",
        "slowest_share": "the slowest one's rate as a share of an equal one",
    },
}


@dataclass(frozen=True, slots=True)
class ScaleOptions:
    """Measure what grows with transfers in flight, regions, peers, and prefills at once."""

    series: Annotated[
        tuple[str, ...], Option(f"{', '.join(SERIES)}; with commas between.", one_of=tuple(SERIES))
    ] = tuple(SERIES)
    transport: Annotated[str, Option("shm, tcp", one_of=("shm", "tcp"))] = "shm"
    at_most: Annotated[int, Option("Of each series.", at_least=1)] = 10_000
    total_mib: Annotated[int, Option("That all prefills write together.", at_least=1)] = 64
    repeats: Annotated[int, Option("Of each step, in fresh processes; the median counts.", at_least=1)] = 3
    seed: Seed = 1

    def __post_init__(self) -> None:
        check(self)

    def steps(self, series: str) -> list[int]:
        """Returns 1, 10, 100, … and the most; prefills are doubled instead."""
        most = min(SERIES[series], self.at_most)
        steps = [(2 if series == "prefills" else 10) ** power for power in range(20)]
        return [*(step for step in steps if step < most), most]


def run(options: ScaleOptions, progress: Say) -> Message:
    """Runs it and returns the result as one JSON object; ``rows`` has the steps of each series."""
    return result_of("scale", options, lambda: _measure(options, progress))


def parts(result: Message) -> Iterator[Part]:
    """Yields what a result is shown as."""
    yield shown.arguments(result, "rows")
    for series, rows in result["rows"].items():
        meanings = COLUMNS[series]
        cells = [(str(row["count"]), *(number(row[name]) for name in meanings)) for row in rows]
        yield Table((series, *meanings), cells)
        for name, meaning in meanings.items():
            yield Words(f"  {name}: {meaning}", "dim")


def _measure(options: ScaleOptions, progress: Say) -> Message:
    rows: dict[str, list[Message]] = {series: [] for series in options.series}
    steps = [(series, count) for series in options.series for count in options.steps(series)]
    for done, (series, count) in enumerate(steps):
        progress(Progress(done, len(steps), f"{count} {series}"))
        repeats = [_step(options, series, count) for _ in range(options.repeats)]
        figures = {name: median((each[name] for each in repeats), digits=4) for name in COLUMNS[series]}
        rows[series].append({"count": count, **figures})
    return {"rows": rows}


def _step(options: ScaleOptions, series: str, count: int) -> dict[str, Any]:
    """One count of one series, in two fresh processes: the hub, and the crowd around it."""
    num_pages = options.total_mib * MIB // PAGE_NBYTES if series == "prefills" else _SMALL_PAGES
    fields = {"transport": options.transport, "num_pages": num_pages, "seed": options.seed}
    with Worker("scale.worker:Hub", fields) as hub, Worker("scale.worker:Crowd", fields) as crowd:
        call_all((hub, crowd), "ready")
        found: dict[str, Any] = {}
        if series == "regions":
            found = hub.call("register", count=count)
        before = psutil.Process(hub.pid).memory_info().rss
        joining = count if series in ("peers", "prefills") else 1
        joined = crowd.call("join", address=hub.call("address")["address"], count=joining)
        hub.call("admit", count=joining)
        if series == "prefills":
            return _prefills(hub, crowd, count, num_pages * PAGE_NBYTES)
        if series == "transfers":
            return crowd.call("write_pages", count=count)
        wrote = crowd.call("write_pages", count=50, at_once=False)
        found |= {"connect_ms": joined["connect_ms"], "transfer_us": wrote["each_us"]}
        if series == "peers":
            found |= hub.call("idle")
            found["rss_kib"] = (psutil.Process(hub.pid).memory_info().rss - before) / KIB / count
        return found


def _prefills(hub: Worker, crowd: Worker, count: int, nbytes: int) -> dict[str, Any]:
    rates = crowd.call("flood", nbytes=nbytes)["gb_per_s_each"]
    if wrong := hub.call("check", count=count, nbytes=nbytes)["wrong"]:
        raise CheckFailedError(f"{count} prefills: {wrong}")
    squares = sum(rate * rate for rate in rates)
    return {
        "gb_per_s": min(rates) * len(rates),  # until the last one's end: each moved as much
        "fairness": sum(rates) ** 2 / (len(rates) * squares),
        "slowest_share": min(rates) * len(rates) / sum(rates),
    }
