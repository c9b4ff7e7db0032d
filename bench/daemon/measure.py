"""``kvxfer bench daemon``: how the node's daemon answers under load, and what it costs when there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final

from kvxfer.bench.daemon import moving_end, programs, telling_end, watching_end
from kvxfer.bench.daemon.asking import Asking, timed_ms
from kvxfer.bench.errors import CheckFailedError
from kvxfer.bench.report import shown
from kvxfer.bench.report.document import Part, Table, Words, number
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.course import Progress, Say, result_of
from kvxfer.bench.run.options import Option, Seed, check
from kvxfer.bench.run.process import Worker
from kvxfer.bench.run.stats import MIB, median, median_ratio, percentiles, spread

#: scene -> its figures -> their meaning.
SCENES: Final = {
    "start": {
        "up_s": "from a daemon's start until it answers",
        "empty_up_s": "the same for an empty application of the same framework",
        "up_ratio": "up_s / empty_up_s, started in turns, median",
        "up_cpu_ratio": "the same ratio of their processor time",
        "ready_ratio": "time until the daemon and its own agent are ready, divided by empty_up_s",
    },
    "idle": {
        "idle_cores": "processor time in a second of a daemon with its own agent and two others, idle",
        "above_empty_mib": "resident memory of the daemon above that of an empty application",
        "empty_mib": "resident memory of the empty application",
    },
    "requests": {
        "request_ms": "a control request while agents move pages at the given rate",
        "quiet_request_ms": "a control request while no pages move",
        "slowest": "the kind of request with the longest p99 under load, and that p99 in ms",
        "moved_per_s": "transfers in a second under load",
        "daemon_cores": "processor time of the daemon in a second under load",
    },
    "cost": {
        "transfer_cpu_us": "processor time of both agents for a transfer at the given rate, without a daemon",
        "attached_cpu_us": "the same with both agents attached to a daemon",
        "cpu_ratio": "attached_cpu_us / transfer_cpu_us, in turns, median",
        "link_share": "share of attached_cpu_us in the threads that talk to the daemon",
    },
    "lists": {
        "page_ms": "one page of a list of all records, with a filter that matches few",
        "pages": "number of pages of that list",
        "beside_ms": "a control request while the list is read",
    },
    "events": {
        "made_per_s": "events in a second that agents sent and watchers received",
        "delay_ms": "from an event to its watcher, for watchers of the topic that 1 in 100 events has",
        "beside_events_ms": "a control request while events are sent",
        "events_daemon_cores": "processor time of the daemon in a second of that",
        "laggard_missed": "events that a watcher which did not read was told it missed; it got all others",
        "grown_mib": "growth of the daemon's resident memory from the first event to the last",
    },
}


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """Measure how fast a node's daemon answers under load, and what it costs without load.

    kvxfer bench daemon --scenes start,idle --seconds 5
    """

    scenes: Annotated[
        tuple[str, ...],
        Option(f"The scenes to measure: {', '.join(SCENES)}.", one_of=tuple(SCENES), value="SCENE"),
    ] = tuple(SCENES)
    transfers_per_s: Annotated[
        float, Option("Rate of transfers while requests are sent.", above=0, value="N")
    ] = 1000.0
    seconds: Annotated[
        float, Option("Duration of each load, and of each rest.", above=0, value="SECONDS")
    ] = 10.0
    records: Annotated[int, Option("Number of records in the lists.", at_least=1)] = 100_000
    agents: Annotated[int, Option("Number of agents that send events.", at_least=1)] = 200
    watchers: Annotated[int, Option("Number of watchers that read events.", at_least=1)] = 100
    events_per_s: Annotated[float, Option("Rate of events.", above=0, value="N")] = 10_000.0
    iterations: Annotated[int, Option("How often to repeat what is measured in turns.", at_least=1)] = 7
    seed: Seed = 1

    def __post_init__(self) -> None:
        check(self)


def run(options: DaemonOptions, progress: Say) -> Message:
    """Runs it and returns the result (`SCENES`) as one JSON object."""

    def measure() -> Message:
        result: Message = {}
        for done, scene in enumerate(options.scenes):
            progress(Progress(done, len(options.scenes), scene))
            result |= _MEASURES[scene](options)
        return result

    return result_of("daemon", options, measure)


def parts(result: Message) -> Iterator[Part]:
    """Yields the parts that show a result."""
    yield shown.arguments(result, *(name for figures in SCENES.values() for name in figures))
    for scene in result["scenes"]:
        rows = [
            (name.replace("_", " "), _in_words(result[name]), Words(meaning, "dim"))
            for name, meaning in SCENES[scene].items()
        ]
        yield Table((scene, "", " "), rows)


def _in_words(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{name} {number(each, 3)}" for name, each in value.items())
    return number(value)


# ---- nothing happens -------------------------------------------------------------------------------


def _start(options: DaemonOptions) -> Message:
    up: dict[str, list[float]] = {"daemon": [], "empty": []}
    cpu: dict[str, list[float]] = {"daemon": [], "empty": []}
    ready = []
    for iteration in range(-1, options.iterations):  # the first start writes compiled files
        for name, begin in (("empty", programs.empty), ("daemon", programs.daemon)):
            with begin() as program:
                if iteration < 0:
                    continue
                up[name].append(program.up_s)
                cpu[name].append(program.up_cpu_s)
                if name == "daemon":
                    ready.append(program.ready_s)
    return {
        "up_s": spread(up["daemon"]),
        "empty_up_s": spread(up["empty"]),
        "up_ratio": median_ratio(up["daemon"], up["empty"]),
        "up_cpu_ratio": median_ratio(cpu["daemon"], cpu["empty"]),
        "ready_ratio": median_ratio(ready, up["empty"]),
    }


def _idle(options: DaemonOptions) -> Message:
    with programs.empty() as empty, programs.daemon() as daemon, _moving(daemon) as moving:
        _await_agents(daemon, 2)
        moving.call("begin", rate=100.0)
        time.sleep(1.0)
        moving.call("end")
        time.sleep(2.0)  # waits until the last transfers are reported
        for program in (empty, daemon):
            with program.client() as client:
                client.ask("GET", "/healthz")
        before_s = daemon.cpu_s()
        time.sleep(options.seconds)
        return {
            "idle_cores": round((daemon.cpu_s() - before_s) / options.seconds, 4),
            "above_empty_mib": round((daemon.rss_nbytes() - empty.rss_nbytes()) / MIB, 1),
            "empty_mib": round(empty.rss_nbytes() / MIB, 1),
        }


# ---- transfers -------------------------------------------------------------------------------------


def _requests(options: DaemonOptions) -> Message:
    with programs.daemon() as daemon, _moving(daemon) as moving:
        _await_agents(daemon, 2)
        quiet = _asked(daemon, options.seconds)
        moving.call("begin", rate=options.transfers_per_s)
        before_s, started = daemon.cpu_s(), time.perf_counter()
        loaded = _asked(daemon, options.seconds)
        cores = (daemon.cpu_s() - before_s) / (time.perf_counter() - started)
        moved = moving.call("end")
    slowest = max(loaded, key=lambda kind: percentiles(loaded[kind])["p99"])
    return {
        "request_ms": _all(loaded),
        "quiet_request_ms": _all(quiet),
        "slowest": f"{slowest} {percentiles(loaded[slowest])['p99']:.1f}",
        "moved_per_s": round(moved["transfers"] / moved["elapsed_s"], 1),
        "daemon_cores": round(cores, 3),
    }


def _cost(options: DaemonOptions) -> Message:
    took: dict[str, list[float]] = {"with": [], "without": []}
    shares = []
    with programs.daemon() as daemon, _moving(daemon) as attached, _moving(None) as alone:
        _await_agents(daemon, 2)
        for iteration in range(-1, options.iterations):
            for name, worker in (("without", alone), ("with", attached)):
                worker.call("begin", rate=options.transfers_per_s)
                time.sleep(options.seconds / 4)
                done = worker.call("end")
                if iteration < 0:
                    continue
                took[name].append(done["cpu_s"] / done["transfers"] * 1e6)
                if worker is attached:
                    shares.append(done["link_cpu_s"] / done["cpu_s"])
    return {
        "transfer_cpu_us": spread(took["without"]),
        "attached_cpu_us": spread(took["with"]),
        "cpu_ratio": median_ratio(took["with"], took["without"]),
        "link_share": median(shares, 4),
    }


# ---- records and events ----------------------------------------------------------------------------


def _lists(options: DaemonOptions) -> Message:
    arguments = ("--no-agent", "--most-transfers", str(options.records))
    with programs.daemon(*arguments) as daemon, _telling(daemon, 10) as telling:
        telling.call("tell", rate=10_000.0, count=options.records)
        telling.call("told")
        _await_index(daemon, options.records)
        asking = Asking(daemon)
        took_ms = []
        try:
            with daemon.client() as client:
                cursor: str | None = ""
                while cursor is not None:
                    query = {"agent": "agent-9", "state": "failed", "cursor": cursor, "limit": 250}
                    found: list[Any] = []
                    took_ms.append(timed_ms(lambda: found.append(client.get("/v1/transfers", **query))))  # noqa: B023
                    cursor = found[0]["next"]
        finally:
            beside = asking.end()
    return {
        "pages": len(took_ms),
        "page_ms": percentiles(took_ms),
        "beside_ms": _all(beside),
    }


def _events(options: DaemonOptions) -> Message:
    fields = {"watchers": options.watchers}
    count = round(options.events_per_s * options.seconds)
    with (
        programs.daemon("--no-agent") as daemon,
        _telling(daemon, options.agents) as telling,
        _worker(watching_end, "WatchingEnd", daemon, fields) as watching,
    ):
        _await_agents(daemon, options.agents)
        first = _last_index(daemon)
        watching.call("begin")
        before_nbytes, before_s, started = daemon.rss_nbytes(), daemon.cpu_s(), time.perf_counter()
        asking = Asking(daemon)
        telling.call("tell", rate=options.events_per_s, count=count)
        telling.call("told")
        _await_index(daemon, first + count)
        elapsed_s, cpu_s = time.perf_counter() - started, daemon.cpu_s() - before_s
        beside = asking.end()
        last = _last_index(daemon)
        seen = watching.call("seen", failed=-(-count // telling_end.FAILED_ONE_IN))
        late = watching.call("read_late", last=last)
        if seen["missed"] or len(set(seen["seen"])) != 1:
            raise CheckFailedError(f"watchers saw {seen['seen']} events and missed {seen['missed']}")
        if late["seen"] + late["missed"] != last - first:
            raise CheckFailedError(
                f"a slow watcher got {late['seen']} events and was told that it missed "
                f"{late['missed']}, of {last - first}"
            )
        return {
            "made_per_s": round(count / elapsed_s, 1),
            "delay_ms": percentiles(seen["delays_ms"]),
            "beside_events_ms": _all(beside),
            "events_daemon_cores": round(cpu_s / elapsed_s, 3),
            "laggard_missed": late["missed"],
            "grown_mib": round((daemon.rss_nbytes() - before_nbytes) / MIB, 1),
        }


# ---- shared by all scenes --------------------------------------------------------------------------

_MEASURES: Final[dict[str, Callable[[DaemonOptions], Message]]] = {
    "start": _start,
    "idle": _idle,
    "requests": _requests,
    "cost": _cost,
    "lists": _lists,
    "events": _events,
}


def _worker(module: Any, name: str, daemon: programs.Program | None, fields: Message) -> Worker:
    where = module.__name__.removeprefix("kvxfer.bench.")
    runtime = "" if daemon is None else str(daemon.api.parent)
    return Worker(f"{where}:{name}", {"runtime": runtime, **fields})


def _moving(daemon: programs.Program | None) -> Worker:
    return _worker(moving_end, "MovingEnd", daemon, {})


def _telling(daemon: programs.Program, agents: int) -> Worker:
    return _worker(telling_end, "TellingEnd", daemon, {"agents": agents})


def _asked(daemon: programs.Program, seconds: float) -> dict[str, list[float]]:
    asking = Asking(daemon)
    time.sleep(seconds)
    return asking.end()


def _all(took_ms: dict[str, list[float]]) -> dict[str, float]:
    return percentiles([each for some in took_ms.values() for each in some])


def _await_agents(daemon: programs.Program, count: int) -> None:
    """Waits until so many agents are attached, besides the daemon's own."""
    with daemon.client() as client:

        def names() -> list[str]:
            return [each["name"] for each in client.get("/v1/agents", limit=250)["items"]]

        _until(lambda: sum(not name.startswith("daemon/") for name in names()) == count)


def _last_index(daemon: programs.Program) -> int:
    with daemon.client() as client:
        text = client.ask("GET", "/metrics")[1].decode()
    name = "kvxfer_daemon_events_last_index "
    return next(int(float(line.removeprefix(name))) for line in text.splitlines() if line.startswith(name))


def _await_index(daemon: programs.Program, index: int) -> None:
    _until(lambda: _last_index(daemon) >= index)


def _until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 60.0
    while not is_so():
        if time.monotonic() > until_s:
            raise CheckFailedError("the daemon did not store the events within 60 s")
        time.sleep(0.02)
