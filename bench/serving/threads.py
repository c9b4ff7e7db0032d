"""Processor time of the threads of some processes: who spins while nothing is to be done."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Idle:
    """What processes used while they had nothing to do, in cores; ``thread`` is the busiest one's name."""

    cores: float
    busiest_cores: float
    thread: str


def watch(groups: Iterable[int], duration_s: float) -> Idle:
    """Watches all threads of the process groups for a while."""
    numbers = frozenset(groups)
    before, start_s = thread_times_s(numbers), time.monotonic()
    time.sleep(duration_s)
    after, elapsed_s = thread_times_s(numbers), time.monotonic() - start_s
    used = {thread: spent - before.get(thread, 0.0) for thread, spent in after.items()}
    busiest = max(used, key=lambda thread: used[thread], default=None)
    if busiest is None:
        return Idle(0.0, 0.0, "")
    try:
        # A thread is a process, too, to who asks for its name.
        name = psutil.Process(busiest).name()
    except psutil.Error:
        name = "?"
    return Idle(sum(used.values()) / elapsed_s, used[busiest] / elapsed_s, name)


def thread_times_s(groups: Iterable[int]) -> dict[int, float]:
    """Returns by thread id what each thread of the process groups has used so far."""
    return dict(_thread_times(frozenset(groups)))


def _thread_times(groups: frozenset[int]) -> Iterator[tuple[int, float]]:
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) in groups:
                for thread in process.threads():
                    yield thread.id, thread.user_time + thread.system_time
        except (psutil.Error, ProcessLookupError):
            continue  # it ended while we looked
