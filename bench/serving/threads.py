"""Processor time of the threads of some processes, from /proc: who spins while nothing is to be done."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
# /proc/PID/stat after the name in parentheses: state ppid pgrp ... utime stime (14 and 15 of the line).
_GROUP = 2
_TIMES = slice(11, 13)
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Idle:
    """What processes used while they had nothing to do, in cores; ``thread`` is the busiest one's name."""

    cores: float
    busiest_cores: float
    thread: str


def watch(groups: Iterable[int], duration_s: float) -> Idle:
    """Watches all threads of the process groups for a while."""
    numbers = frozenset(groups)
    before = thread_times_ns(numbers)
    start_ns = time.monotonic_ns()
    time.sleep(duration_s)
    after = thread_times_ns(numbers)
    elapsed_ns = time.monotonic_ns() - start_ns
    used = {key: spent - before.get(key, (0, ""))[0] for key, (spent, _) in after.items()}
    busiest = max(used, key=lambda key: used[key], default=None)
    if busiest is None:
        return Idle(0.0, 0.0, "")
    return Idle(sum(used.values()) / elapsed_ns, used[busiest] / elapsed_ns, after[busiest][1])


def thread_times_ns(groups: Iterable[int], proc: Path = _PROC) -> dict[int, tuple[int, str]]:
    """Returns by thread id what each thread of the process groups has used so far, and its name."""
    numbers = frozenset(groups)
    found: dict[int, tuple[int, str]] = {}
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if int(_fields(folder / "stat")[_GROUP]) not in numbers:
                continue
            tasks = list((folder / "task").iterdir())
        except OSError:
            continue  # it ended while we looked
        for task in tasks:
            try:
                found[int(task.name)] = _time_ns(task), (task / "comm").read_text().strip()
            except OSError:
                continue
    return found


def _time_ns(task: Path) -> int:
    """Returns a thread's time on a processor; in ticks of the clock where the kernel counts no finer."""
    try:
        return int((task / "schedstat").read_text().split()[0])
    except (OSError, IndexError, ValueError):
        return sum(int(field) for field in _fields(task / "stat")[_TIMES]) * _TICK_NS


def _fields(path: Path) -> list[str]:
    # The name may hold spaces and parentheses itself.
    return path.read_text().rpartition(")")[2].split()
