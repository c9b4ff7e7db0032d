"""Two directories of runs: whether one is faster, with a bound on chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvxfer.bench.report.runs import Runs, better

# The range of n runs holds the true median with a chance of 1 - 2^(1-n): 0.94 for 5. With fewer, no
# resampling can give an interval of 95%.
MIN_RUNS = 5
CONFIDENCE = 0.95
_RESAMPLES = 5000

MULTIPLICITY = (
    f"Each interval contains the true ratio with {CONFIDENCE:.0%} confidence. If nothing changed, about one "
    f"in {round(1 / (1 - CONFIDENCE))} figures still gets a verdict. Judge by the figure that you meant to "
    "change."
)

Verdict = Literal["faster", "slower", "better", "worse", "cannot tell"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of one kind of run: the second directory against the first.

    ``ratio`` is of the medians, within ``bounds`` with `CONFIDENCE`; ``why`` says what hinders a verdict.
    """

    figure: str
    first_median: float
    second_median: float
    first_runs: int
    second_runs: int
    ratio: float
    verdict: Verdict
    why: str = ""
    bounds: tuple[float, float] | None = None

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
    verdict: Verdict = "cannot tell"
    why, bounds = "", None
    if min(*first, *second) <= 0:
        why = "not above 0 in every run, so the ratio has no meaning"
    elif min(len(first), len(second)) < MIN_RUNS:
        why = f"at least {MIN_RUNS} runs of each are needed"
    else:
        bounds = ratio_interval(first, second)
        direction = better(figure)
        if direction == 0 and not bounds[0] <= 1 <= bounds[1]:
            why = "it differs, but its name does not say which way is better"
        elif not bounds[0] <= 1 <= bounds[1]:
            verdict = _word(figure, (ratio > 1) == (direction > 0))
    return Comparison(figure, *medians, len(first), len(second), ratio, verdict, why, bounds)


def ratio_interval(first: list[float], second: list[float], seed: int = 1) -> tuple[float, float]:
    """Returns the percentile-bootstrap interval of median(second) / median(first). Same seed, same bounds."""
    from scipy import stats

    def ratio(first: Any, second: Any, axis: int) -> Any:
        return np.median(second, axis=axis) / np.median(first, axis=axis)

    found = stats.bootstrap(
        (first, second),
        ratio,
        method="percentile",
        confidence_level=CONFIDENCE,
        n_resamples=_RESAMPLES,
        vectorized=True,
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)


def _word(figure: str, gained: bool) -> Verdict:
    # Memory, shares and processor time are not fast.
    if any(part in figure for part in ("cpu", "rss", "share", "mib", "cores", "fairness")):
        return "better" if gained else "worse"
    return "faster" if gained else "slower"
