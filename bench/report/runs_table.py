"""``kvxfer bench report --format table``: many runs, or two directories side by side, on a terminal."""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvxfer.bench.report.comparison import CONFIDENCE, MULTIPLICITY, cautions, compare
from kvxfer.bench.report.results import Found
from kvxfer.bench.report.runs import Runs, by_bench, gather, machines_of

_STYLES = {"faster": "green", "better": "green", "slower": "red", "worse": "red"}


def print_one(console: Console, name: str, found: Found) -> None:
    """Prints medians and spreads of one directory."""
    _print_head(console, name, found)
    for _, groups in by_bench(gather(found.records)):
        for runs in groups:
            _print_kind(console, runs)
            for failure in runs.failures:
                console.print(f"[bold red]check failed[/]: {escape(failure)}", soft_wrap=True)
            table = _table("figure", "median", "min", "max", "runs")
            for figure, values in runs.figures.items():
                row = (np.median(values), min(values), max(values))
                table.add_row(escape(figure), *(f"{value:.4g}" for value in row), str(len(values)))
            if runs.figures:
                console.print(table)


def print_two(console: Console, names: tuple[str, str], first: Found, second: Found) -> None:
    """Prints the second directory against the first, with a verdict for every figure."""
    for name, found in zip(names, (first, second), strict=True):
        _print_head(console, name, found)
    for words in cautions(first.records, second.records):
        console.print(f"[yellow]{words}[/]", soft_wrap=True)
    theirs = {runs.kind: runs for runs in gather(second.records)}
    alone = []
    for _, groups in by_bench(gather(first.records)):
        for runs in groups:
            if (other := theirs.pop(runs.kind, None)) is None:
                alone.append((names[0], runs))
                continue
            _print_kind(console, runs)
            _print_compared(console, runs, other)
    alone += [(names[1], runs) for runs in theirs.values()]
    for where, runs in alone:
        console.print(
            f"only in {where}: {runs.kind.bench}, {runs.kind.in_words()}", soft_wrap=True, markup=False
        )
    console.print(f"[dim]{MULTIPLICITY}[/]", soft_wrap=True)


def _print_head(console: Console, name: str, found: Found) -> None:
    console.print(f"{name}: {len(found.records)} results", soft_wrap=True, markup=False)
    for words in machines_of(found.records):
        console.print(f"[dim]{escape(words)}[/]", soft_wrap=True)
    for warning in found.warnings:
        console.print(f"[yellow]{escape(warning)}[/]", soft_wrap=True)


def _print_kind(console: Console, runs: Runs) -> None:
    console.print(f"[bold]{escape(runs.kind.bench)}[/] {escape(runs.kind.in_words())}", soft_wrap=True)


def _print_compared(console: Console, first: Runs, second: Runs) -> None:
    table = _table("figure", "first", "second", "ratio", f"{CONFIDENCE:.0%} interval", "runs")
    table.add_column("verdict")
    for one in compare(first, second):
        table.add_row(
            escape(one.figure),
            f"{one.first_median:.4g}",
            f"{one.second_median:.4g}",
            f"{one.ratio:.3f}",
            one.bounds_in_words(),
            f"{one.first_runs}, {one.second_runs}",
            f"[{_STYLES.get(one.verdict, 'dim')}]{one.in_words()}[/]",
        )
    console.print(table)


def _table(first: str, *others: str) -> Table:
    table = Table(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
