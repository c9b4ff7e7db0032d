"""Counts and stages of ended transfers' ends, for /metrics."""

from __future__ import annotations

from bisect import bisect_left
from itertools import product
from typing import Final, NamedTuple

from kvxfer.session.records import Record

#: Upper bounds in seconds: from one page within a host to the length of a deadline.
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
#: Names of stages: waiting for the right, for the first byte, for the last byte, and the total.
STAGES: Final = ("right", "first_piece", "moving", "total")
#: Codes with which an end of a transfer or an expectation fails: those that docs/errors.md marks "awaiting".
FAILURES: Final = (
    "not-permitted",
    "lease-ended",
    "region-gone",
    "deadline",
    "integrity",
    "refused",
    "no-path",
    "peer-lost",
    "peer-silent",
    "peer-restarted",
    "auth-failed",
    "protocol",
    "closed",
)
#: Outcomes and codes that are counted from 0: the increase of a series that begins at 1 would not be seen.
KNOWN: Final = (("done", ""), ("cancelled", "cancelled"), *product(("failed",), FAILURES))
_MOVING: Final = ("source", "destination")


class Example(NamedTuple):
    """A duration in a bucket, and the transfer that it belongs to."""

    transfer: str
    context: str
    duration_ns: int
    at_s: float


class Histogram:
    """Counts of durations by bucket, and the newest example in each bucket."""

    __slots__ = ("counts", "examples", "sum_ns")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.examples: list[Example | None] = [None] * len(self.counts)
        self.sum_ns = 0

    def add(self, duration_ns: int, transfer: str, context: str, at_s: float) -> None:
        """Counts one duration."""
        bucket = bisect_left(_BOUNDS_NS, duration_ns)
        self.counts[bucket] += 1
        self.examples[bucket] = Example(transfer, context, duration_ns, at_s)
        self.sum_ns += duration_ns


def verb_of(record: Record) -> str:
    """Returns ``read`` where the destination began the transfer, else ``write``.

    A write may be posted before its pages are computed (``hold=``, ``after=``): its stages contain that time.
    """
    return "read" if record.ours == (record.role == "destination") else "write"


class TransferCounts:
    """Counts of all ends since the daemon's start."""

    def __init__(self) -> None:
        #: By role, outcome and code; `KNOWN` ones are there from the start.
        self.ended: dict[tuple[str, str, str], int] = {
            (role, outcome, code): 0 for role in (*_MOVING, "expectation") for outcome, code in KNOWN
        }
        self.nbytes: dict[str, int] = dict.fromkeys(_MOVING, 0)
        #: By role, verb (`verb_of`) and stage.
        self.stages: dict[tuple[str, str, str], Histogram] = {}

    def add(self, record: Record, transfer: str, at_s: float) -> None:
        """Counts an end of a transfer, or an expectation; the time of the report is a time of day."""
        role = record.role
        key = (role, record.outcome, record.code)
        self.ended[key] = self.ended.get(key, 0) + 1
        if role == "expectation" or not record.posted_ns:
            return
        if record.outcome == "done":
            self.nbytes[role] = self.nbytes.get(role, 0) + record.nbytes
        begun, first, ended = record.begun_ns, record.first_piece_ns, record.ended_ns
        verb = verb_of(record)
        stages = (
            ("right", record.posted_ns, begun),
            ("first_piece", begun, first),
            ("moving", first, ended),
            ("total", record.posted_ns, ended),
        )
        for stage, start_ns, end_ns in stages:
            if start_ns and end_ns:
                place = (role, verb, stage)
                if (histogram := self.stages.get(place)) is None:
                    histogram = self.stages[place] = Histogram()
                histogram.add(max(0, end_ns - start_ns), transfer, record.context, at_s)
