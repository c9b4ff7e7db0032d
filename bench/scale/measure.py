"""``kvxfer bench scale``: what grows with transfers, regions, peers and pages, and what stands still."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from kvxfer.bench.report import shown
from kvxfer.bench.report.document import Part, Table, Words, number
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.course import Progress, Say, result_of
from kvxfer.bench.run.options import Option, Seed, check
from kvxfer.bench.run.stats import median
from kvxfer.bench.scale import steps

#: what -> how many of it, at most.
SERIES = {
    "transfers": 100_000,
    "served": 40_000,
    "served_to_one": 40_000,
    "regions": 1_000,
    "peers": 1_000,
    "standing": 1_000,
    "blocks": 1_000_000,
    "pages": 100_000,
    "prefills": 16,
}
_SERVED = {
    "open": "writes of one agent that were open at its peers at the same time",
    "done": "writes that ended as done",
    "each_us": "from the peers' permission to the last end, divided by the number of writes",
}
#: series -> its columns -> what they mean.
COLUMNS = {
    "transfers": {
        "post_us": "one post",
        "each_us": "a transfer of one page: from the first post to the last end, divided by their number",
    },
    "served": _SERVED,
    "served_to_one": {**_SERVED, "open": "the same to one peer, where both ends' options allow as many"},
    "regions": {
        "register_us": "one more region",
        "connect_ms": "a new peer, which gets the descriptions of all regions",
        "transfer_us": "one page to one of the regions, from idle to idle",
    },
    "peers": {
        "connect_ms": "one more peer",
        "transfer_us": "one page from one of them, while the others are idle",
        "idle_cpu_cores": "processor time in a second of the agent with all peers, idle",
        "private_kib": "the agent's private memory and page tables, for each peer",
        "rss_kib": (
            "all resident memory of the agent, for each peer, including its mapping of the peer's pool"
        ),
    },
    "standing": {
        "transfer_us": (
            f"one page, beside this many idle peers, each with {steps.PARKED_EACH} parked transfers"
        ),
        "ratio": "transfer_us divided by the same without other peers and transfers, measured in turns",
        "cpu_us": "processor time of the receiving agent for that transfer",
        "cpu_ratio": "the same ratio of cpu_us",
    },
    "blocks": {
        "end_us": "makes an expectation of one block in a region of this many, and cancels it",
        "end_us_peers": f"the same with {steps.EXPECTING_PEERS} peers",
    },
    "pages": {
        "gb_per_s": f"one write of this many pages of {steps.FINE_PAGE_NBYTES} bytes",
        "hold_ms": "the longest processor time for which a thread held an agent's gate, at either end",
        "long_holds": "how many times a thread held the gate for more than 2 ms",
    },
    "prefills": {
        "gb_per_s": "the rate of all prefills that write into one decode at once",
        "fairness": "Jain's index of their rates: 1 if all are equal, 1/n if one has everything",
        "slowest_share": "the slowest rate as a share of an equal one",
    },
}


@dataclass(frozen=True, slots=True)
class ScaleOptions:
    """Measure costs that grow with transfers, regions, peers, pages, idle peers or parked transfers.

    kvxfer bench scale --series peers,prefills --at-most 100
    """

    series: Annotated[
        tuple[str, ...], Option(f"The series to measure: {', '.join(SERIES)}.", one_of=tuple(SERIES))
    ] = tuple(SERIES)
    transport: Annotated[str, Option("The transport.", one_of=("shm", "tcp"))] = "shm"
    at_most: Annotated[int, Option("The largest count of each series.", at_least=1)] = max(SERIES.values())
    total_mib: Annotated[int, Option("Bytes that all prefills write together.", at_least=1)] = 64
    repeats: Annotated[
        int, Option("How often to run each step, in new processes; the result is the median.", at_least=1)
    ] = 3
    seed: Seed = 1

    def __post_init__(self) -> None:
        check(self)

    def counts(self, series: str) -> list[int]:
        """Returns 1, 10, 100, … and the most; prefills are doubled instead."""
        most = min(SERIES[series], self.at_most)
        counts = [(2 if series == "prefills" else 10) ** power for power in range(20)]
        return [*(count for count in counts if count < most), most]


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
    wanted = [(series, count) for series in options.series for count in options.counts(series)]
    setting = steps.Setting(options.transport, options.total_mib, options.seed)
    for done, (series, count) in enumerate(wanted):
        progress(Progress(done, len(wanted), f"{count} {series}"))
        repeats = [steps.STEPS[series](setting, count) for _ in range(options.repeats)]
        figures = {name: median((each[name] for each in repeats), digits=4) for name in COLUMNS[series]}
        rows[series].append({"count": count, **figures})
    return {"rows": rows}
