"""Plots of a report: rows of marks over one axis, as the elements of a page. Words in, no markup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvxfer.bench.report import axis
from kvxfer.bench.report.axis import Axis
from kvxfer.bench.report.comparison import Comparison
from kvxfer.bench.report.labels import beside_prefill

# Noise of a thousandth is no cloud: an axis of ratios reaches so far at least.
_LEAST_SPREAD = 1.01
# A run further from its median than so many times as far as three quarters of all runs (as logarithms) is
# drawn at the axis's end, so that it does not squeeze the others together.
_FAR = 4
# Of the time until decode may start, what is shown before the end of prefill.
_BEFORE_END = 0.25
_STAGES = ("post", "first_layer", "last_layer", "decode_may_start")


@dataclass(frozen=True, slots=True)
class Mark:
    """What is drawn from ``low`` to ``high``, a dot where they are one; ``kind`` names its colour."""

    low: float
    high: float
    kind: str


@dataclass(frozen=True, slots=True)
class Row:
    """A row: its label, and marks, later ones above."""

    label: str
    marks: Sequence[Mark]


@dataclass(frozen=True, slots=True)
class Plot:
    """Rows over one axis. ``line`` is drawn through all of them; ``legend`` has the kinds that need words."""

    rows: Sequence[Row]
    axis: Axis
    caption: str
    line: float
    legend: Mapping[str, str]

    def drawn(self) -> dict[str, str]:
        """Returns the legend of what is drawn, and of nothing else."""
        kinds = {mark.kind for row in self.rows for mark in row.marks}
        return {kind: words for kind, words in self.legend.items() if kind in kinds}


def runs(figures: Mapping[str, Sequence[float]]) -> Plot | None:
    """Returns each run over the median of its figure; None where no figure has two runs on one side of 0."""
    ratios: dict[str, list[float]] = {}
    for name, measured in figures.items():
        words, values = beside_prefill(name, measured)
        if len(values) > 1 and min(values) > 0:
            ratios[words] = [float(each) for each in np.asarray(values) / np.median(values)]
    if not ratios:
        return None
    distances = np.abs(np.log([ratio for row in ratios.values() for ratio in row]))
    reach = max(_LEAST_SPREAD, float(np.exp(_FAR * np.quantile(distances, 0.75))))
    rows = []
    for words, row in ratios.items():
        far = [each for each in row if not 1 / reach <= each <= reach]
        label = words if not far else f"{words} (far: {', '.join(map(axis.words, far))})"
        rows.append(Row(label, [Mark(each, each, "far" if each in far else "run") for each in row]))
    near = [mark.low for row in rows for mark in row.marks if mark.kind == "run"]
    return Plot(
        rows,
        axis.ratios([*near, _LEAST_SPREAD], "run / median of the runs"),
        "Each run divided by the median of its figure.",
        1.0,
        {"far": "beyond the axis, at its value in brackets"},
    )


def intervals(found: Sequence[Comparison]) -> Plot | None:
    """Returns the ratios that have an interval; None where none has."""
    rows = [
        Row(
            beside_prefill(one.figure, [one.first_median, one.second_median])[0],
            [Mark(*one.bounds, _kind(one)), Mark(one.ratio, one.ratio, _kind(one))],
        )
        for one in found
        if one.bounds is not None and one.bounds[0] > 0
    ]
    if not rows:
        return None
    ends = [end for row in rows for mark in row.marks for end in (mark.low, mark.high)]
    return Plot(
        rows,
        axis.ratios([*ends, _LEAST_SPREAD], "second / first"),
        "Ratios of the medians with their intervals; an interval that contains 1 may be chance.",
        1.0,
        {"good": "faster or better", "bad": "slower or worse", "unclear": "cannot tell"},
    )


def timeline(stages_ms: Mapping[str, float], num_runs: int) -> list[Plot]:
    """Returns a push from its posting on, and its end alone, which is too short to be seen in the whole."""
    whose = "one run" if num_runs == 1 else f"{num_runs} runs"
    post, first, last, ready = (stages_ms[name] for name in _STAGES)
    marks = [
        Mark(post, first, "waits"),
        Mark(first, last, "moves"),
        Mark(last, ready, "tells"),
    ]
    legend = {
        "waits": "posted, no layer in place yet",
        "moves": "layers arrive",
        "tells": "until decode may start",
    }
    unit = "ms from the end of prefill"
    whole = Plot(
        [Row("whole push", marks)],
        axis.linear(post, max(ready, 0.0), unit),
        f"A push with the median stages of {whose}; the line marks the end of prefill.",
        0.0,
        legend,
    )
    if ready <= 0:
        return [whole]
    low = -_BEFORE_END * ready
    at_end = [Mark(max(mark.low, low), mark.high, mark.kind) for mark in marks if mark.high > low]
    end = Plot(
        [Row("its end", at_end)],
        axis.linear(low, ready * (1 + _BEFORE_END), unit),
        f"The end of the same push: decode may start {ready:.3g} ms after prefill ended.",
        0.0,
        legend,
    )
    return [whole, end]


def _kind(one: Comparison) -> str:
    return {"faster": "good", "better": "good", "slower": "bad", "worse": "bad"}.get(one.verdict, "unclear")
