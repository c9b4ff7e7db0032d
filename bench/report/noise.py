"""Processor time that went to others while a benchmark ran, from /proc.

A share is of all cores for the whole run: on two cores, a neighbour that keeps one busy takes 0.5.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvxfer.bench.run.channel import Message

_PROC = Path("/proc")
#: Above this share a table says so. A desktop or a container host at rest is below it.
NOTABLE_SHARE = 0.03

# /proc/stat, "cpu" line: user nice system idle iowait irq softirq steal guest guest_nice. The two of
# guests are counted in user and nice already.
_NUM_FIELDS = 8
_STEAL = 7
# Interrupts belong to nobody, and the loopback network of the benchmark itself runs in them: they are
# not counted as a neighbour's, so `other_share` is a lower bound.
_WORK = (0, 1, 2)

# /proc/PID/stat after the name in parentheses: state ppid ... utime stime cutime cstime (14 to 17 of
# the whole line).
_PARENT = 1
_TIMES = slice(11, 15)


@dataclass(frozen=True, slots=True)
class Sample:
    """The machine's processor time so far, in clock ticks; ``at_s`` is monotonic."""

    at_s: float
    work_ticks: int
    steal_ticks: int
    total_ticks: int
    own_ticks: int

    @classmethod
    def take(cls, proc: Path = _PROC, pid: int | None = None) -> Self | None:
        """Reads the counters now; None where the machine does not show them.

        ``pid`` is the root of the process tree that is not noise, by default this process.
        """
        try:
            line = (proc / "stat").read_text().split("\n", 1)[0].split()
            ticks = [int(field) for field in line[1 : 1 + _NUM_FIELDS]]
            own_ticks = _tree_ticks(proc, os.getpid() if pid is None else pid)
        except (OSError, ValueError):
            return None
        if len(ticks) < _NUM_FIELDS:
            return None
        return cls(time.monotonic(), sum(ticks[i] for i in _WORK), ticks[_STEAL], sum(ticks), own_ticks)


def between(before: Sample | None, after: Sample | None) -> Message | None:
    """Returns what happened between two samples, ready for JSON; None where it cannot be known.

    ``own_share`` is the benchmark with its children, ``other_share`` all other processes (at least:
    interrupts are not counted), ``steal_share`` what the hypervisor gave to other machines.
    """
    if before is None or after is None or after.total_ticks <= before.total_ticks:
        return None
    total = after.total_ticks - before.total_ticks
    own = after.own_ticks - before.own_ticks
    other = max(0, after.work_ticks - before.work_ticks - own)
    return {
        "wall_s": round(after.at_s - before.at_s, 3),
        "own_share": round(own / total, 4),
        "other_share": round(other / total, 4),
        "steal_share": round((after.steal_ticks - before.steal_ticks) / total, 4),
    }


def in_words(noise: Message | None) -> str:
    """Returns a warning for people, empty when the machine was quiet enough or does not tell."""
    if noise is None:
        return ""
    parts = [
        f"{what} {noise[key]:.0%}"
        for key, what in (("other_share", "other processes used"), ("steal_share", "the hypervisor took"))
        if noise[key] > NOTABLE_SHARE
    ]
    if not parts:
        return ""
    return f"noise: {' and '.join(parts)} of this machine's processor time during the run"


def _tree_ticks(proc: Path, root: int) -> int:
    """Returns user and system time of a process and all that descend from it.

    Children that have ended are in their parent's sums once it has waited for them.
    """
    ticks: dict[int, int] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # The name may hold spaces and parentheses itself.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended while we looked
        pid = int(folder.name)
        children[int(fields[_PARENT])].append(pid)
        ticks[pid] = sum(int(field) for field in fields[_TIMES])
    total, waiting = 0, [root]
    while waiting:
        pid = waiting.pop()
        total += ticks.get(pid, 0)
        waiting += children[pid]
    return total
