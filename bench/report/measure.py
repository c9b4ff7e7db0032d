"""``kvxfer bench report``: many kept runs, or two directories of them side by side."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from kvxfer.bench.report import noise, plots
from kvxfer.bench.report.comparison import CONFIDENCE, MIN_RUNS, MULTIPLICITY, Comparison, compare
from kvxfer.bench.report.document import Part, Table, Words, number
from kvxfer.bench.report.labels import beside_prefill, is_stage, label
from kvxfer.bench.report.plots import Plot
from kvxfer.bench.report.results import Found
from kvxfer.bench.report.runs import Runs, gather, machines_of

_PACE = ", at prefill's pace"
_STYLES = {"faster": "good", "better": "good", "slower": "bad", "worse": "bad"}


def parts(names: Sequence[str], found: Sequence[Found]) -> Iterator[Part]:
    """Yields what one directory is shown as, or the second one judged against the first."""
    return (part for part in with_plots(names, found) if not isinstance(part, Plot))


def with_plots(names: Sequence[str], found: Sequence[Found]) -> Iterator[Part | Plot]:
    """Yields the same with the plots of a page."""
    for name, one in zip(names, found, strict=True):
        times = sorted(record.time for record in one.records)
        yield Words(
            f"{name}: {len(one.records)} results, {_to_seconds(times[0])} to {_to_seconds(times[-1])}"
        )
        yield from (Words(words, "dim") for words in machines_of(one.records))
        yield from (Words(warning, "warn") for warning in one.warnings)
    if len(found) == 1:
        yield from _one(found[0])
    else:
        yield from _two(names, found[0], found[1])


def _to_seconds(time: str) -> str:
    return re.sub(r"\.\d+", "", time).replace("T", " ").replace("+00:00", " UTC")


def _one(found: Found) -> Iterator[Part | Plot]:
    for runs in gather(found.records):
        yield Words(runs.kind.in_words(), "bold")
        yield from (Words(f"check failed: {failure}", "bad") for failure in runs.failures)
        if runs.figures:
            yield _figures(runs)
            yield from _plots_of(runs)
        # Of many runs the loudest stands for all.
        words = noise.in_words(max((record.noise for record in runs.records), key=noise.share_of_others))
        if words:
            yield Words(words, "dim")


def _plots_of(runs: Runs) -> Iterator[Plot]:
    stages = {name.split(".")[1]: values for name, values in runs.figures.items() if _is_p50_of_stage(name)}
    if stages:
        num_runs = len(next(iter(stages.values())))
        medians = {name: float(np.median(values)) for name, values in stages.items()}
        yield from plots.timeline(medians, num_runs)
    # One run lies at 1 of itself: nothing to be drawn, and its table says that it is one.
    if (plot := plots.runs(runs.figures)) is not None:
        yield plot


def _is_p50_of_stage(name: str) -> bool:
    return is_stage(name) and name.endswith(".p50")


def _figures(runs: Runs) -> Table:
    """A row for each figure; one run has a value, and no spread that would look like one of many."""
    most = max(map(len, runs.figures.values()))
    rows = []
    for name, told in runs.figures.items():
        words, values = beside_prefill(name, told)
        words += _PACE if _is_rate(name) and _is_paced(runs) else ""
        cells = [number(value) for value in np.percentile(values, [50, 0, 100]).tolist()]
        unit = label(name)[1]
        rows.append((words, cells[0], unit) if most == 1 else (words, *cells, unit, str(len(values))))
    return Table(
        ("figure", "one run", "unit") if most == 1 else ("figure", "median", "min", "max", "unit", "runs"),
        rows,
    )


def _is_rate(figure: str) -> bool:
    return figure.startswith("gb_per_s")


def _is_paced(runs: Runs) -> bool:
    """Whether a rate is that of a prefill which computes layers, and no transfer's own."""
    return dict(runs.kind.arguments).get("prefill_ms_per_layer", "0") != "0"


def _two(names: Sequence[str], first: Found, second: Found) -> Iterator[Part | Plot]:
    yield Words(MULTIPLICITY, "dim")
    theirs = {runs.kind: runs for runs in gather(second.records)}
    alone: list[tuple[str, Runs]] = []
    for runs in gather(first.records):
        if (other := theirs.pop(runs.kind, None)) is None:
            alone.append((names[0], runs))
            continue
        yield Words(runs.kind.in_words(), "bold")
        compared = compare(runs, other)
        yield from _compared(compared, is_paced=_is_paced(runs))
        if (plot := plots.intervals(compared)) is not None:
            yield plot
    for where, runs in (*alone, *((names[1], runs) for runs in theirs.values())):
        yield Words(f"only in {where}: {runs.kind.in_words()}", "dim")


def _verdict(one: Comparison) -> Words:
    if is_stage(one.figure) and max(one.first_median, one.second_median) < 0:
        return Words("before prefill ended", "dim")
    return Words(one.in_words(), _STYLES.get(one.verdict, "dim"))


def _compared(found: list[Comparison], *, is_paced: bool) -> Iterator[Part]:
    if not found:
        yield Words("no figure in common")
        return
    rows: list[Sequence[str | Words]] = []
    for one in found:
        words, medians = beside_prefill(one.figure, [one.first_median, one.second_median])
        words += _PACE if is_paced and _is_rate(one.figure) else ""
        unit = label(one.figure)[1]
        rows.append(
            (
                f"{words}, {unit}" if unit else words,
                number(medians[0]),
                number(medians[1]),
                f"{one.ratio:.3f}",
                "" if one.bounds is None else "{:.3f} to {:.3f}".format(*one.bounds),
                f"{one.first_runs}, {one.second_runs}",
                _verdict(one),
            )
        )
    head = ("figure", "first", "second", "ratio", f"{CONFIDENCE:.0%} interval", "runs", "verdict")
    yield Table(head, rows)
    if not any(one.bounds for one in found):
        yield Words(f"A verdict needs {MIN_RUNS} runs in each directory.", "dim")
