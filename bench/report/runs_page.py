"""``kvxfer bench report``: the page of many runs, or of two directories side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvxfer.bench.report import html, noise, plots
from kvxfer.bench.report.comparison import CONFIDENCE, MIN_RUNS, MULTIPLICITY, Comparison, cautions, compare
from kvxfer.bench.report.html import Content, Markup
from kvxfer.bench.report.results import Found
from kvxfer.bench.report.runs import Runs, by_bench, common, gather, machines_of, varying


def one(name: str, found: Found) -> str:
    """Returns the page of one directory."""
    parts: list[Content] = [*_head([(name, found)])]
    for bench, groups in by_bench(gather(found.records)):
        same = common(groups) if len(groups) > 1 else frozenset()
        parts.append(html.element("h2", bench))
        if same:
            parts.append(html.paragraph("all: ", groups[0].kind.in_words(varying(groups)), kind="dim"))
        for runs in groups:
            parts += _group(runs, same)
    return html.page(f"kvxfer bench: {name}", parts)


def two(names: tuple[str, str], first: Found, second: Found) -> str:
    """Returns the page that judges the second directory against the first."""
    parts: list[Content] = [*_head(list(zip(names, (first, second), strict=True)))]
    parts += [html.paragraph(text) for text in cautions(first.records, second.records)]
    parts.append(html.paragraph(MULTIPLICITY, kind="dim"))
    theirs = {runs.kind: runs for runs in gather(second.records)}
    alone: list[Runs] = []
    for bench, groups in by_bench(gather(first.records)):
        parts.append(html.element("h2", bench))
        for runs in groups:
            if (other := theirs.pop(runs.kind, None)) is None:
                alone.append(runs)
                continue
            parts.append(html.element("h3", runs.kind.in_words()))
            parts += _compared(compare(runs, other), names)
    parts += [
        html.paragraph(f"only in {where}: {runs.kind.bench}, {runs.kind.in_words()}", kind="dim")
        for where, those in ((names[0], alone), (names[1], theirs.values()))
        for runs in those
    ]
    return html.page(f"kvxfer bench: {names[1]} against {names[0]}", parts)


def _head(named: Sequence[tuple[str, Found]]) -> Iterable[Content]:
    for name, found in named:
        times = sorted(record.time for record in found.records)
        yield html.paragraph(f"{name}: {len(found.records)} results, {times[0]} to {times[-1]}")
        for words in machines_of(found.records):
            yield html.paragraph(words, kind="dim")
        for warning in found.warnings:
            yield html.paragraph(warning, kind="bad")


def _group(runs: Runs, same: frozenset[str]) -> list[Content]:
    parts: list[Content] = [html.element("h3", runs.kind.in_words(same) or "as above")]
    parts += [html.paragraph(f"check failed: {failure}", kind="bad") for failure in runs.failures]
    rows = []
    for name, values in runs.figures.items():
        low, high = min(values), max(values)
        rows.append(
            (
                name,
                f"{np.median(values):.4g}",
                f"{low:.4g} to {high:.4g}",
                str(len(values)),
                plots.strip(values, low, high),
            )
        )
    if rows:
        numbers = frozenset({1, 2, 3})
        parts.append(html.table(("figure", "median", "spread of the runs", "runs", ""), rows, numbers))
    loud = dict.fromkeys(filter(None, (noise.in_words(record.noise) for record in runs.records)))
    parts += [html.paragraph(words, kind="dim") for words in loud]
    return parts


def _compared(found: list[Comparison], names: tuple[str, str]) -> list[Content]:
    if not found:
        return [html.paragraph("no figure in common")]
    bounded = [one for one in found if one.low is not None and one.high is not None]
    head = (
        "figure",
        f"median of {names[0]}",
        f"median of {names[1]}",
        "ratio",
        f"{CONFIDENCE:.0%} interval",
        "runs",
        "verdict",
    )
    table = [
        (
            one.figure,
            f"{one.first_median:.4g}",
            f"{one.second_median:.4g}",
            f"{one.ratio:.3f}",
            one.bounds_in_words(),
            f"{one.first_runs}, {one.second_runs}",
            _verdict(one),
        )
        for one in found
    ]
    parts: list[Content] = [html.table(head, table, frozenset({1, 2, 3, 4, 5}))]
    if bounded:
        rows = [
            plots.Interval(one.figure, one.low or 0, one.ratio, one.high or 0, _KINDS.get(one.verdict, ""))
            for one in bounded
        ]
        parts.append(html.figure(plots.intervals(rows, "ratio of medians"), f"{names[1]} over {names[0]}"))
    elif any(one.why.startswith(str(MIN_RUNS)) for one in found):
        parts.append(html.paragraph(f"A verdict needs {MIN_RUNS} runs in each directory.", kind="dim"))
    return parts


_KINDS = {"faster": "good", "better": "good", "slower": "bad", "worse": "bad"}


def _verdict(one: Comparison) -> Markup:
    return html.element("span", one.in_words(), _KINDS.get(one.verdict, "dim"))
