"""What a result is shown as: words and tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Of tables in files and pipes, where nobody says how wide a line may be.
_WIDTH = 120
_STYLES = {"good": "green", "bad": "bold red", "warn": "yellow", "": ""}


@dataclass(frozen=True, slots=True)
class Words:
    """A line. ``style`` is ``"bold"``, ``"dim"``, ``"good"``, ``"bad"``, ``"warn"`` or none."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Numbers stand to the right; a column without a name says what a row means. An empty row is a line."""

    head: Sequence[str]
    rows: Sequence[Sequence[str | Words]]


Part = Words | Table


def number(value: Any, digits: int = 4) -> str:
    """Returns a figure for people: whole above 1000, four digits below; other values as they are."""
    if isinstance(value, float):
        return f"{value:.{digits}g}" if abs(value) < 10 ** (digits - 1) else f"{value:.0f}"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value)


def spread_in_words(values: Mapping[str, float] | None) -> str:
    """Returns ``median (min to max)``."""
    if values is None:
        return "-"
    middle, least, most = (number(float(values[key]), 3) for key in ("median", "min", "max"))
    return f"{middle} ({least} to {most})"


def figures_table(
    result: Mapping[str, Any], meanings: Mapping[str, str], columns: Sequence[str] = ("min", "median", "max")
) -> Table:
    """Returns a row for each figure that the result has: spreads in columns, others in the middle."""
    rows: list[Sequence[str | Words]] = []
    for name, meaning in meanings.items():
        if name in result:
            value = result[name]
            cells = [value.get(key, "") if isinstance(value, dict) else "" for key in columns]
            if not isinstance(value, dict):
                cells[len(columns) // 2] = value
            rows.append((name.replace("_", " "), *map(number, cells), Words(meaning, "dim")))
    return Table(("", *columns, ""), rows)


def print_parts(parts: Iterable[Part]) -> None:
    """Prints them on standard output."""
    from rich import table as rich_table
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)

    def text(cell: str | Words) -> Text:
        if isinstance(cell, str):
            return Text(cell)
        return Text(cell.text, _STYLES.get(cell.style, cell.style))

    for part in parts:
        if isinstance(part, Table):
            shown = rich_table.Table()
            for place, name in enumerate(part.head):
                shown.add_column(Text(name), justify="right" if place and name else "left")
            for row in part.rows:
                shown.add_row(*map(text, row)) if row else shown.add_section()
            console.print(shown)
        else:
            # A sentence that somebody may search for stays on one line.
            console.print(text(part), soft_wrap=True)
