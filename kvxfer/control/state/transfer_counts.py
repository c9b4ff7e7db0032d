"""Counts and stages of ends that have ended, for /metrics."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from kvxfer.session.records import Record

#: Upper bounds in seconds: from what a page within a host takes to what a deadline ends.
BOUNDS_S: Final = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    10,
    60,
)
_BOUNDS_NS: Final = tuple(int(bound * 1e9) for bound in BOUNDS_S)
#: Names of stages: waiting for a right, for the first byte, for the last one, and all of it.
STAGES: Final = ("right", "first_piece", "moving", "total")


class Histogram:
    """Counts of durations by bucket."""

    __slots__ = ("counts", "sum_ns")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_ns = 0

    def add(self, duration_ns: int) -> None:
        """Counts one."""
        self.counts[bisect_left(_BOUNDS_NS, duration_ns)] += 1
        self.sum_ns += duration_ns


class TransferCounts:
    """Of all ends since the daemon's start."""

    def __init__(self) -> None:
        self.ended: dict[tuple[str, str, str], int] = {}
        self.nbytes: dict[str, int] = {}
        self.stages: dict[tuple[str, str], Histogram] = {}

    def add(self, record: Record) -> None:
        """Counts an end, or an expectation."""
        role = record.role
        key = (role, record.outcome, record.code)
        self.ended[key] = self.ended.get(key, 0) + 1
        if role == "expectation" or not record.posted_ns:
            return
        if record.outcome == "done":
            self.nbytes[role] = self.nbytes.get(role, 0) + record.nbytes
        begun, first, ended = record.begun_ns, record.first_piece_ns, record.ended_ns
        if begun:
            self._add(role, "right", begun - record.posted_ns)
            if first:
                self._add(role, "first_piece", first - begun)
        if first and ended:
            self._add(role, "moving", ended - first)
        if ended:
            self._add(role, "total", ended - record.posted_ns)

    def _add(self, role: str, stage: str, duration_ns: int) -> None:
        histogram = self.stages.get((role, stage))
        if histogram is None:
            histogram = self.stages[role, stage] = Histogram()
        histogram.add(max(0, duration_ns))
