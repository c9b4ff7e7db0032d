"""Rates of copies on a GPU beside their limits, checked before they are measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import torch

from kvxfer.bench.errors import CheckFailedError
from kvxfer.bench.gpu.copies import Copy

# A measurement lasts this long, so that what it takes to begin and end one is nothing.
_LEAST_S: Final = 0.02
# A GPU's clock at most: a pause of so many cycles lasts at least as long as it is to.
_MOST_HZ: Final = 2.1e9
# What is queued behind a pause; a stream takes about a thousand of them.
_MOST_QUEUED: Final = 100


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: medians of the rounds' rates, and of their ratios to the limit of the same round.

    ``asked`` is the ratio that it is to reach (0: nothing was asked), ``submit_us`` what one of them takes of
    this host's thread.
    """

    group: str
    name: str
    gb_per_s: float
    ratio: float
    least: float
    most: float
    asked: float
    submit_us: float

    @classmethod
    def of(
        cls, group: str, name: str, rates: Any, ratios: Any, *, asked: float = 0.0, submit_s: float = 0.0
    ) -> Self:
        """Returns the row of what the rounds gave."""
        middle, least, most = np.percentile(ratios, [50, 0, 100]).round(3).tolist()
        rate = round(float(np.median(rates)), 1)
        return cls(group, name, rate, middle, least, most, asked, round(submit_s * 1e6, 1))


def measure(copies: list[Copy], rounds: int, say: Callable[..., None]) -> Iterator[Row]:
    """Checks each, then measures those that are right round by round.

    The first is the limit of the others. ``say`` is told that each has ``begun`` before it runs for the first
    time: should the device fail, that one did it; and whose bytes are ``wrong``, which is not measured.
    """
    right: list[Copy] = []
    for copy in copies:
        say("begun", name=copy.name)
        copy.dst.zero_()
        torch.cuda.synchronize()
        copy.submit()
        copy.stream.synchronize()
        try:
            copy.check()
        except CheckFailedError as error:
            say("wrong", name=copy.name, words=str(error))
            if copy is copies[0]:
                return
            continue
        right.append(copy)
    say("begun", name="")
    counts = [min(_MOST_QUEUED, max(1, int(_LEAST_S / max(seconds(copy, 3) / 3, 1e-6)))) for copy in right]
    submit_s = [submission_s(copy) for copy in right]
    rates: list[list[float]] = [[] for _ in right]
    for _ in range(rounds):
        for copy, count, each, found in zip(right, counts, submit_s, rates, strict=True):
            found.append(copy.nbytes * count / seconds(copy, count, 1.5 * count * each) / 1e9)
    for copy, each, found in zip(right, submit_s, rates, strict=True):
        ratios = np.array(found) / np.array(rates[0])
        yield Row.of(copy.group, copy.name, found, ratios, asked=copy.asked, submit_s=each)


def seconds(copy: Copy, count: int, queued_in_s: float = 0.0) -> float:
    """Returns what the device takes for `count` of them, one after the other.

    For ``queued_in_s`` the stream pauses in front of them, while this host queues them all: what is measured
    then is the device, and not how soon Python comes round.
    """
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if queued_in_s:
        with torch.cuda.stream(copy.stream):
            torch.cuda._sleep(int(queued_in_s * _MOST_HZ))
    first.record(copy.stream)
    for _ in range(count):
        copy.submit()
    last.record(copy.stream)
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def submission_s(copy: Copy) -> float:
    """Returns what submitting one takes of this thread, the median of nine while the stream is idle."""
    taken = []
    for _ in range(9):
        copy.stream.synchronize()
        began = time.perf_counter()
        copy.submit()
        taken.append(time.perf_counter() - began)
    copy.stream.synchronize()
    return float(np.median(taken))


def rate(copy: Copy) -> Callable[[], float]:
    """Returns what measures a limit's GB/s, for others to be measured beside it."""
    count = max(1, int(_LEAST_S / max(seconds(copy, 3) / 3, 1e-6)))
    each = submission_s(copy)
    return lambda: float(copy.nbytes * count / seconds(copy, count, 1.5 * count * each) / 1e9)
