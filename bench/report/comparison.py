"""Two directories of runs: whether one is faster, with a bound on chance. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvxfer.bench.report import noise
from kvxfer.bench.report.results import Record
from kvxfer.bench.report.runs import Runs, better

# The range of n runs holds the true median with a chance of 1 - 2^(1-n): 0.94 for 5. With fewer, no
# resampling can give an interval of 95%.
MIN_RUNS = 5
CONFIDENCE = 0.95
_RESAMPLES = 5000
_SEED = 1

MULTIPLICITY = (
    f"Intervals hold the true ratio with {CONFIDENCE:.0%}, each for itself: where nothing changed, about "
    f"one in {round(1 / (1 - CONFIDENCE))} figures still gets a verdict. Judge by the figure that you meant "
    "to change."
)

Verdict = Literal["faster", "slower", "better", "worse", "cannot tell"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of one kind of run: the second directory against the first.

    ``ratio`` is of the medians, second over first, between ``low`` and ``high`` with `CONFIDENCE`;
    the bounds are None where there are too few runs. ``why`` says what hinders a verdict.
    """

    figure: str
    first_median: float
    second_median: float
    first_runs: int
    second_runs: int
    ratio: float
    low: float | None
    high: float | None
    verdict: Verdict
    why: str = ""

    def bounds_in_words(self) -> str:
        """Returns the interval, empty where there is none."""
        return "" if self.low is None or self.high is None else f"{self.low:.3f} to {self.high:.3f}"

    def in_words(self) -> str:
        """Returns the verdict with what hinders it."""
        return f"{self.verdict}: {self.why}" if self.why else self.verdict


def compare(first: Runs, second: Runs) -> list[Comparison]:
    """Returns the comparison of every figure that both have."""
    return [
        compare_figure(name, values, second.figures[name])
        for name, values in first.figures.items()
        if name in second.figures
    ]


def compare_figure(figure: str, first: list[float], second: list[float]) -> Comparison:
    """Compares the runs of one figure; what chance alone may explain is "cannot tell"."""
    medians = float(np.median(first)), float(np.median(second))
    ratio = medians[1] / medians[0] if medians[0] else float("nan")

    def done(
        verdict: Verdict, why: str = "", low: float | None = None, high: float | None = None
    ) -> Comparison:
        return Comparison(figure, *medians, len(first), len(second), ratio, low, high, verdict, why)

    if min(*first, *second) <= 0:
        return done("cannot tell", "not above 0 in every run, so a ratio has no meaning")
    if min(len(first), len(second)) < MIN_RUNS:
        return done("cannot tell", f"{MIN_RUNS} runs of each are needed")
    low, high = ratio_interval(first, second)
    direction = better(figure)
    if low <= 1 <= high:
        return done("cannot tell", "", low, high)
    if direction == 0:
        return done("cannot tell", "it differs, but its name does not say which way is better", low, high)
    gained = (ratio > 1) == (direction > 0)
    return done(_word(figure, gained), "", low, high)


def ratio_interval(first: list[float], second: list[float], seed: int = _SEED) -> tuple[float, float]:
    """Returns the percentile-bootstrap interval of median(second) / median(first). Same seed, same bounds."""
    generator = np.random.default_rng(seed)
    medians = [
        np.median(generator.choice(np.asarray(values), (_RESAMPLES, len(values))), axis=1)
        for values in (first, second)
    ]
    tail = (1 - CONFIDENCE) / 2 * 100
    low, high = np.percentile(medians[1] / medians[0], [tail, 100 - tail])
    return float(low), float(high)


def cautions(first: list[Record], second: list[Record]) -> Iterable[str]:
    """Yields what makes the two directories hard to compare."""
    hardware = [
        {
            tuple(record.machine.get(key) for key in ("cpu", "cores", "kernel", "governor"))
            for record in records
        }
        for records in (first, second)
    ]
    if hardware[0] != hardware[1]:
        yield "Measured on different machines: the ratios below compare them as much as the software."
    loud = sum(bool(noise.in_words(record.noise)) for record in (*first, *second))
    if loud:
        yield f"{loud} of {len(first) + len(second)} runs had notable noise from other processes or machines."


def _word(figure: str, gained: bool) -> Verdict:
    # Memory, shares and processor time are not fast.
    if any(part in figure for part in ("cpu", "rss", "share", "mib", "cores", "fairness")):
        return "better" if gained else "worse"
    return "faster" if gained else "slower"
