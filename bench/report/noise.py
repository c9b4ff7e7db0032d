"""Processor time that went to others while a benchmark ran.

A share is of all cores for the whole run: on two cores, a neighbour that keeps one busy takes 0.5.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import psutil

from kvxfer.bench.run.channel import Message

#: Above this share a table says so. A desktop or a container host at rest is below it.
NOTABLE_SHARE = 0.03


@dataclass(frozen=True, slots=True)
class Sample:
    """The machine's processor time so far, in seconds; ``at_s`` is monotonic. Interrupts are no work."""

    at_s: float
    work_s: float
    steal_s: float
    total_s: float
    own_s: float

    @classmethod
    def take(cls) -> Self:
        """Reads the counters now; what is no noise is the process tree below this process."""
        times = psutil.cpu_times()
        guests = times.guest + times.guest_nice  # in user and nice already
        root = psutil.Process()
        return cls(
            time.monotonic(),
            times.user + times.nice + times.system,
            times.steal,
            sum(times) - guests,
            processor_s([root, *root.children(recursive=True)]),
        )


def processor_s(processes: Iterable[psutil.Process]) -> float:
    """Returns user and system time of the processes, and of their children that have ended."""
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue  # it ended while we looked
        total += times.user + times.system + times.children_user + times.children_system
    return total


def between(before: Sample, after: Sample) -> Message | None:
    """Returns what happened between two samples, ready for JSON; None where no time has passed.

    ``own_share`` is the benchmark's, ``steal_share`` what the hypervisor gave to other machines.
    """
    total = after.total_s - before.total_s
    if total <= 0:
        return None
    own = after.own_s - before.own_s
    return {
        "wall_s": round(after.at_s - before.at_s, 3),
        "own_share": round(own / total, 4),
        "other_share": round(max(0.0, after.work_s - before.work_s - own) / total, 4),
        "steal_share": round((after.steal_s - before.steal_s) / total, 4),
    }


def share_of_others(noise: Message | None) -> float:
    """Returns which share of the machine's processor time others took."""
    return 0.0 if noise is None else float(noise["other_share"] + noise["steal_share"])


def in_words(noise: Message | None) -> str:
    """Returns a warning for people, empty when the machine was quiet enough or does not tell."""
    parts = [
        f"{what} {noise[key]:.0%}"
        for key, what in (("other_share", "other processes used"), ("steal_share", "the hypervisor took"))
        if noise is not None and noise[key] > NOTABLE_SHARE
    ]
    return f"noise: {' and '.join(parts)} of this machine's processor time during the run" if parts else ""
