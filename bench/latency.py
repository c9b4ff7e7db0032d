"""``kvxfer bench latency``: one small write and its notification, seen at the far end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from kvxfer.bench.channel import Message
from kvxfer.bench.errors import BenchError, CheckFailedError
from kvxfer.bench.process import REPLY_TIMEOUT_S, Worker, call_all, check_timeout, receive_any
from kvxfer.bench.progress import Progress

TRANSPORTS = ("shm", "unix", "tcp")
WAITS = ("poll", "event")

FIGURES = {
    "min_us": "the fastest",
    "p50_us": "from before the write to the notification in the far end's hands: half of a round trip",
    "p90_us": "",
    "p99_us": "",
    "post_us": "of that, the call that posts the write",
    "cpu_us": "processor time of both ends for each way, polling included",
}

_WORD_NBYTES = 8


@dataclass(frozen=True, slots=True)
class LatencyOptions:
    """What goes back and forth. ``wait``: both ends poll, or both sleep until asyncio wakes them."""

    transport: str = "shm"
    nbytes: int = 4096
    wait: str = "poll"
    iterations: int = 2000
    seed: int = 1
    timeout_s: float = 30.0
    #: Flips a byte after each arrival, so that the check must fail.
    corrupt: bool = False

    def __post_init__(self) -> None:
        for name, known in (("transport", TRANSPORTS), ("wait", WAITS)):
            if getattr(self, name) not in known:
                raise BenchError(f"unknown --{name} {getattr(self, name)!r}; known are {', '.join(known)}")
        if self.nbytes < _WORD_NBYTES or self.nbytes % _WORD_NBYTES:
            raise BenchError(f"--nbytes is a multiple of {_WORD_NBYTES}, not {self.nbytes}")
        if self.iterations < 1:
            raise BenchError(f"--iterations is at least 1, not {self.iterations}")
        check_timeout(self.timeout_s)

    @property
    def warmup(self) -> int:
        """Iterations that are not measured: page faults, the compiled program, caches."""
        return max(10, self.iterations // 5)


def run(options: LatencyOptions, progress: Callable[[Progress], None]) -> Message:
    """Runs it and returns the result as one JSON object; ``verified`` is false when a check failed."""
    described: Message = asdict(options)
    described.pop("corrupt")
    result: Message = {"bench": "latency", **described}
    try:
        return {**result, **_measure(options, progress), "verified": True}
    except CheckFailedError as error:
        return {**result, "verified": False, "failure": str(error)}


def _measure(options: LatencyOptions, progress: Callable[[Progress], None]) -> Message:
    with Worker("near", asdict(options)) as near, Worker("far", asdict(options)) as far:
        progress(Progress(0, 1, "setting up two agents"))
        call_all((near, far), "open")
        near.call("connect", address=far.call("address")["address"])
        far.call("accept")
        call_all((near, far), "grant")
        progress(Progress(0, 1, f"{options.iterations} round trips"))
        far.channel.send("answer")
        near.channel.send("ask")
        # Whichever fails first says why; the other only misses it.
        replies = {}
        for _ in range(2):
            worker, message = receive_any((near, far), REPLY_TIMEOUT_S)
            replies[worker.role] = message
        asked, answered = replies["near"], replies["far"]
        progress(Progress(1, 1, "done"))
    # Known for sure when it has been used: a path that fails at first gives way to another.
    paths = {reply["path"] for reply in replies.values()}
    if paths != {options.transport}:
        found = " and ".join(sorted(paths))
        raise CheckFailedError(f"asked for {options.transport}, but the bytes went over {found}")
    # What the far end does between seeing one write and posting the next is no part of either way.
    round_trips_ns = np.array(asked["round_trips_ns"]) - np.array(answered["held_ns"])
    one_way_us = round_trips_ns[options.warmup :] / 2e3
    p50, p90, p99 = np.percentile(one_way_us, [50, 90, 99]).round(2).tolist()
    return {
        "p50_us": p50,
        "p90_us": p90,
        "p99_us": p99,
        "min_us": round(float(one_way_us.min()), 2),
        "post_us": round(float(np.median(asked["posts_ns"][options.warmup :])) / 1e3, 2),
        "cpu_us": round((asked["cpu_ns"] + answered["cpu_ns"]) / 2e3 / len(round_trips_ns), 2),
        "rails": [options.transport],
    }
