"""``kvxfer bench scale``: what grows with transfers in flight, regions, peers, and prefills at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from kvxfer.bench.errors import CheckFailedError
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.interrupt import Interrupt
from kvxfer.bench.run.option_checks import check_counts, check_known, check_one_of
from kvxfer.bench.run.process import Worker, call_all
from kvxfer.bench.run.progress import Progress
from kvxfer.bench.run.stats import KIB, MIB, median

TRANSPORTS = ("shm", "tcp")
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
    """Which series, and up to how many; steps are powers of ten and the end."""

    series: tuple[str, ...] = tuple(SERIES)
    transport: str = "shm"
    at_most: int = 10_000
    total_mib: int = 64
    repeats: int = 3
    seed: int = 1

    def __post_init__(self) -> None:
        for name in self.series:
            check_one_of("series", name, SERIES)
        check_known(self, transport=TRANSPORTS)
        check_counts(self, "at_most", "total_mib", "repeats")

    def steps(self, series: str) -> list[int]:
        """Returns 1, 10, 100, … and the most; prefills are doubled instead."""
        most = min(SERIES[series], self.at_most)
        factor = 2 if series == "prefills" else 10
        steps, step = [], 1
        while step < most:
            steps.append(step)
            step *= factor
        return [*steps, most]


def run(options: ScaleOptions, progress: Callable[[Progress], None]) -> Message:
    """Runs it and returns the result as one JSON object; ``verified`` is false when a check failed."""
    described: Message = {**asdict(options), "series": list(options.series)}
    result: Message = {"bench": "scale", **described}
    steps = [(series, count) for series in options.series for count in options.steps(series)]
    rows: dict[str, list[Message]] = {series: [] for series in options.series}
    interrupted: Message = {}
    try:
        with Interrupt() as interrupt:
            for done, (series, count) in enumerate(steps):
                if interrupt.stops(done):
                    interrupted = {"interrupted": True}
                    break
                progress(Progress(done, len(steps), f"{count} {series}"))
                repeats = [_step(options, series, count) for _ in range(options.repeats)]
                figures = {
                    name: median((each[name] for each in repeats), digits=4) for name in COLUMNS[series]
                }
                rows[series].append({"count": count, **figures})
    except CheckFailedError as error:
        return {**result, "rows": rows, "verified": False, "failure": str(error)}
    return {**result, **interrupted, "rows": rows, "verified": True}


def _step(options: ScaleOptions, series: str, count: int) -> dict[str, float]:
    """One count of one series, in two fresh processes: the hub, and the crowd around it."""
    num_pages = options.total_mib * MIB // PAGE_NBYTES if series == "prefills" else _SMALL_PAGES
    fields = {"transport": options.transport, "num_pages": num_pages, "seed": options.seed}
    with Worker("hub", fields) as hub, Worker("crowd", fields) as crowd:
        call_all((hub, crowd), "open")
        address = hub.call("address")["address"]
        measure: dict[str, Callable[[], dict[str, Any]]] = {
            "transfers": lambda: _transfers(hub, crowd, address, count),
            "regions": lambda: _regions(hub, crowd, address, count),
            "peers": lambda: _peers(hub, crowd, address, count),
            "prefills": lambda: _prefills(hub, crowd, address, count, num_pages * PAGE_NBYTES),
        }
        return measure[series]()


def _transfers(hub: Worker, crowd: Worker, address: str, count: int) -> dict[str, Any]:
    crowd.call("join", address=address, count=1)
    hub.call("admit", count=1)
    return crowd.call("write_pages", count=count)


def _regions(hub: Worker, crowd: Worker, address: str, count: int) -> dict[str, Any]:
    registered = hub.call("register", count=count)
    joined = crowd.call("join", address=address, count=1)
    hub.call("admit", count=1)
    wrote = crowd.call("write_pages", count=50, at_once=False)
    return {
        "register_us": registered["register_us"],
        "connect_ms": joined["connect_ms"],
        "transfer_us": wrote["each_us"],
    }


def _peers(hub: Worker, crowd: Worker, address: str, count: int) -> dict[str, Any]:
    before = hub.call("usage")
    joined = crowd.call("join", address=address, count=count)
    hub.call("admit", count=count)
    wrote = crowd.call("write_pages", count=50, at_once=False)
    idle = hub.call("idle")
    after = hub.call("usage")
    return {
        "connect_ms": joined["connect_ms"],
        "transfer_us": wrote["each_us"],
        "idle_cpu_cores": idle["idle_cpu_cores"],
        "rss_kib": (after["rss_kib"] - before["rss_kib"]) / count,
    }


def _prefills(hub: Worker, crowd: Worker, address: str, count: int, nbytes: int) -> dict[str, Any]:
    crowd.call("join", address=address, count=count)
    hub.call("admit", count=count)
    rates = crowd.call("flood", nbytes=nbytes)["gb_per_s_each"]
    checked = hub.call("check", count=count, nbytes=nbytes)
    if checked["wrong"]:
        raise CheckFailedError(f"{count} prefills: {checked['wrong']}")
    squares = sum(rate * rate for rate in rates)
    return {
        "gb_per_s": min(rates) * len(rates),  # until the last one's end: each moved as much
        "fairness": sum(rates) ** 2 / (len(rates) * squares),
        "slowest_share": min(rates) * len(rates) / sum(rates),
    }
