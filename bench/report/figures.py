"""Tables of results that are named figures, each with its meaning: latency, plan, setup, scale."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from kvxfer.bench.latency import measure as latency
from kvxfer.bench.plan import measure as plan
from kvxfer.bench.run.channel import Message
from kvxfer.bench.scale import measure as scale
from kvxfer.bench.setup import measure as setup

_MEANINGS = {"latency": latency.FIGURES, "plan": plan.FIGURES, "setup": setup.FIGURES}
_COLUMNS = ("min", "median", "max")


def print_figures(console: Console, result: Message) -> None:
    """Prints a result of one of these benchmarks."""
    console.print(f"[bold]{result['bench']}[/]: {_arguments(result)}")
    if result["bench"] == "scale":
        for series, rows in result["rows"].items():
            _print_series(console, series, rows)
        return
    table = Table("", *_COLUMNS, "")
    for column in table.columns[1:4]:
        column.justify = "right"
    for name, meaning in _MEANINGS[result["bench"]].items():
        if name not in result:
            continue  # of layouts that differ
        value = result[name]
        cells = [_text(value[key]) for key in _COLUMNS] if isinstance(value, dict) else ["", _text(value), ""]
        table.add_row(name, *cells, f"[dim]{meaning}[/]")
    console.print(table)


def _print_series(console: Console, series: str, rows: list[Message]) -> None:
    meanings = scale.COLUMNS[series]
    table = Table(series, *meanings, title=None)
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        table.add_row(str(row["count"]), *(_text(row[name]) for name in meanings))
    console.print(table)
    for name, meaning in meanings.items():
        console.print(f"  [dim]{name}: {meaning}[/]")


def _arguments(result: Message) -> str:
    names = [name for name in result if name not in ("bench", "verified", "rows", *_all_figures())]
    return ", ".join(f"{name.replace('_', ' ')} {_text(result[name])}" for name in names)


def _all_figures() -> set[str]:
    return {name for meanings in _MEANINGS.values() for name in meanings}


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return " ".join(value) if isinstance(value, list) else str(value)
