"""``kvxfer bench latency``: one small write and its notification, seen at the far end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.bench.errors import BenchError, CheckFailedError
from kvxfer.bench.latency.limit import open_limit, open_wakes
from kvxfer.bench.report import shown
from kvxfer.bench.report.document import Part, figures_table
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.counters import Counters, counted
from kvxfer.bench.run.course import Progress, Say, result_of
from kvxfer.bench.run.options import REPLY_TIMEOUT_S, Corrupt, Option, Seed, Timeout, check
from kvxfer.bench.run.process import Worker, call_all, receive_any

FIGURES = {
    "min_us": "the fastest",
    "p50_us": "from before the write until the far end has the notification: half of a round trip",
    "p90_us": "",
    "p99_us": "",
    "post_us": "the call that posts the write, part of p50_us",
    "limit_us": (
        "the machine's limit, median: Python hands over the bytes and waits in the same "
        "way, without an engine"
    ),
    "limit_ratio": "limit_us / p50_us: 1 is the limit",
    "wake_us": (
        "with --wait event: a bare wake-up, median: a process asleep in read() of an eventfd, no Python"
    ),
    "wake_ups": "p50_us / wake_us: how many bare wake-ups the write takes",
    "wake_one_us": "wake_us with both on one processor; in wake_us the kernel chooses, as for the write",
    "wake_two_us": "wake_us with each on its own processor",
}

_WORD_NBYTES = 8
# Of our writes, and of the limit's and wake-ups beside them: a machine's mood is in all of them.
_ROUNDS = 8
# At each end in each round and place: each takes an idle while, and the median of 1,600 stands.
_WAKES = 100

Nbytes = Annotated[int, Option("Bytes of one write.", at_least=_WORD_NBYTES)]


@dataclass(frozen=True, slots=True)
class LatencyOptions:
    """Measure a write of a page until the far end has its notification: half of a round trip.

    kvxfer bench latency --transport tcp --wait event
    """

    transport: Annotated[str, Option("The transport.", one_of=("shm", "unix", "tcp"))] = "shm"
    nbytes: Nbytes = 4096
    wait: Annotated[
        str,
        Option("poll: both ends poll; event: both sleep until asyncio wakes them.", one_of=("poll", "event")),
    ] = "poll"
    iterations: Annotated[
        int, Option("Measured round trips; a fifth as many precede as a warm-up.", at_least=1)
    ] = 2000
    seed: Seed = 1
    timeout_s: Timeout = 30.0
    corrupt: Corrupt = False

    def __post_init__(self) -> None:
        check(self)
        if self.nbytes % _WORD_NBYTES:
            raise BenchError(f"--nbytes must be a multiple of {_WORD_NBYTES}, not {self.nbytes}")

    @property
    def warmup(self) -> int:
        """Iterations that are not measured: page faults, the compiled program, caches."""
        return max(10, self.iterations // 5)


def run(options: LatencyOptions, progress: Say, counters: Counters | None = None) -> Message:
    """Runs it and returns the result (`FIGURES`) as one JSON object; ``counters`` count the round trips."""
    return result_of("latency", options, lambda: _measure(options, progress, counters))


def parts(result: Message) -> Iterator[Part]:
    """Yields what a result is shown as."""
    yield shown.arguments(result, *FIGURES)
    yield figures_table(result, FIGURES, ("",))


def _measure(options: LatencyOptions, progress: Say, counters: Counters | None) -> Message:
    ours, limit = Ways(), Ways()
    places = _wake_places() if options.wait == "event" else {}
    wakes_ns: dict[str, list[int]] = {name: [] for name in places}
    with (
        Worker("latency.worker:Latency", {**asdict(options), "name": "near"}, "near") as near,
        Worker("latency.worker:Latency", {**asdict(options), "name": "far"}, "far") as far,
    ):
        ends = near, far
        progress(Progress(0, _ROUNDS, "setting up two agents"))
        call_all(ends, "open")
        near.call("connect", address=far.call("address")["address"])
        far.call("accept")
        call_all(ends, "grant")
        open_limit(options.transport, options.nbytes, ends)
        if places:
            open_wakes(ends)
        _exchange(ends, "", first=0, count=options.warmup)
        _exchange(ends, "bare.", first=0, count=options.warmup)
        done = options.warmup
        for index in range(_ROUNDS):
            count = (options.iterations * (index + 1)) // _ROUNDS + options.warmup - done
            progress(Progress(index, _ROUNDS, f"{options.iterations} round trips, and the machine's limit"))
            if count == 0:
                continue
            with counted(counters, near.pid, far.pid):
                exchanged = _exchange(ends, "", first=done, count=count)
            ours.add(*exchanged)
            limit.add(*_exchange(ends, "bare.", first=done, count=count))
            for name, processors in places.items():
                for reply in _exchange(ends, "wakes.", count=_WAKES, processors=processors):
                    wakes_ns[name] += reply["wakes_ns"]
            done += count
        progress(Progress(_ROUNDS, _ROUNDS, "done"))
    # Known for sure when it has been used: a path that fails at first gives way to another.
    if ours.paths != {options.transport}:
        found = " and ".join(sorted(ours.paths))
        raise CheckFailedError(f"{options.transport} was chosen, but the bytes went over {found}")
    figures = ours.figures()
    figures["post_us"] = round(float(np.median(ours.posts_ns)) / 1e3, 2)
    figures["limit_us"] = limit.figures()["p50_us"]
    figures["limit_ratio"] = round(figures["limit_us"] / figures["p50_us"], 3)
    for name, found_ns in wakes_ns.items():
        figures[name] = round(float(np.median(found_ns)) / 1e3, 2)
    if places:
        figures["wake_ups"] = round(figures["p50_us"] / figures["wake_us"], 2)
    return {**figures, "rails": [options.transport]}


def _wake_places() -> dict[str, tuple[list[int], list[int]]]:
    """Returns the processors for the two ends of bare wake-ups, under the names of their figures.

    The kernel's choice, of `wake_us`, hangs on what else runs.
    """
    ours = sorted(os.sched_getaffinity(0))
    places = {"wake_us": (ours, ours), "wake_one_us": (ours[:1], ours[:1])}
    if len(ours) > 1:
        places["wake_two_us"] = ours[:1], ours[1:2]
    return places


class Ways:
    """What was measured of one way of writing, over all rounds."""

    def __init__(self) -> None:
        self._both_ways_ns: list[int] = []
        self.posts_ns: list[int] = []
        self.paths: set[str] = set()

    def add(self, asked: Message, answered: Message) -> None:
        """Keeps what the two ends replied in one round.

        What the far end does between seeing one write and posting the next is no part of either way.
        """
        pairs = zip(asked["round_trips_ns"], answered["held_ns"], strict=True)
        self._both_ways_ns += [there_and_back - held for there_and_back, held in pairs]
        self.posts_ns += asked.get("posts_ns", [])
        for reply in (asked, answered):
            if "path" in reply:
                self.paths.add(reply["path"])

    def figures(self, skip: int = 0) -> dict[str, float]:
        """Returns ``p50_us`` and so on of one way, without the first ``skip`` of them."""
        one_way_us: NDArray[np.float64] = np.array(self._both_ways_ns[skip:]) / 2e3
        found = np.percentile(one_way_us, [50, 90, 99, 0]).round(2).tolist()
        return dict(zip(("p50_us", "p90_us", "p99_us", "min_us"), found, strict=True))


def _exchange(ends: tuple[Worker, Worker], prefix: str, **fields: Any) -> tuple[Message, Message]:
    """Has the near end ask and the far end answer, and returns what they reply."""
    near, far = ends
    far.send(f"{prefix}answer", **fields)
    near.send(f"{prefix}ask", **fields)
    # Whichever fails first says why; the other only misses it.
    replies = {}
    for _ in range(2):
        worker, message = receive_any(ends, REPLY_TIMEOUT_S)
        replies[worker.role] = message
    return replies["near"], replies["far"]
