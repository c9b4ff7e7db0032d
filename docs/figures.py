"""Writes the tables of ratios in README.md and docs/benchmarks.md from docs/figures.json.

To add what a machine gave, run a row's command there, add a line to the row's ``measured``, and run
`python docs/figures.py`:

``on``, ``date``
    The processor, a key of ``processors``; the day.
``ratio``, ``spread``
    The median of the rounds, and the lowest and highest, if they are known.
``others``
    The share of the processor time that other processes took, where it was more than 0.2. Such a ratio is
    shown on the page of benchmarks only, and is not part of a row's range.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README, BENCHMARKS = ROOT / "README.md", ROOT / "docs/benchmarks.md"


def figures() -> dict[str, Any]:
    """Returns what was measured."""
    found: dict[str, Any] = json.loads((ROOT / "docs/figures.json").read_text())
    return found


def quiet(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a row's measurements while the machine did little else."""
    return [each for each in row["measured"] if "others" not in each]


def extent(values: Iterable[Any]) -> str:
    """Returns the least and the greatest, in words; one of them if they are equal."""
    found = sorted(values)
    return " to ".join(map(str, dict.fromkeys((found[0], found[-1]))))


def days(dates: Iterable[str]) -> str:
    """Returns the first and the last day, in words; without the month of the last if it is the same."""
    first, _, last = extent(dates).partition(" to ")
    return f"{first} to {last.removeprefix(first[:8])}" if last else first


def readme_text() -> str:
    """Returns README's key to the processors, and its table."""
    told = figures()
    rows = [row for row in told["rows"] if "readme" in row]
    dates: dict[str, list[str]] = {}
    lines = []
    for row in rows:
        for each in quiet(row):
            dates.setdefault(each["on"], []).append(each["date"])
        on = [key for key in told["processors"] if any(each["on"] == key for each in quiet(row))]
        ratio = extent(each["ratio"] for each in quiet(row))
        lines.append((row["readme"], f"{ratio} × {row['beside']}", ", ".join(on), f"`{row['command']}`"))
    key = "; ".join(
        f"{name}: {told['processors'][name]}, {days(dates[name])}"
        for name in told["processors"]
        if name in dates
    )
    return f"{key}.\n\n{_table(('what', 'result', 'on', 'command'), lines)}"


def benchmarks_text() -> str:
    """Returns the table of every row, with a column for each kind of processor."""
    told = figures()
    processors = told["processors"]
    lines = [
        (
            row["what"],
            row["beside"],
            f"**{extent(each['ratio'] for each in quiet(row))}**",
            *("; ".join(_cell(each) for each in row["measured"] if each["on"] == key) for key in processors),
            f"`{row['command']}`",
        )
        for row in told["rows"]
    ]
    return _table(("what", "beside", "range", *processors.values(), "command"), lines)


def _cell(measured: dict[str, Any]) -> str:
    spread = f" ({measured['spread'][0]} to {measured['spread'][1]})" if "spread" in measured else ""
    others = f", other work {measured['others']:.0%}" if "others" in measured else ""
    return f"{measured['ratio']}{spread}, {measured['date']}{others}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def written(text: str, after: str, new: str) -> str:
    """Returns a document with new lines from the one that begins with ``after`` to the end of its table."""
    place = re.compile(rf"^{re.escape(after)}(?:.*\n(?!\|))*(?:.*\n)(?:\|.*\n)+", re.MULTILINE)
    changed, count = place.subn(lambda _: f"{new}\n", text, count=1)
    assert count == 1, after
    return changed


def documents() -> dict[Path, str]:
    """Returns the documents as they must be."""
    return {
        README: written(README.read_text(), "E: ", readme_text()),
        BENCHMARKS: written(BENCHMARKS.read_text(), "| what | beside | range |", benchmarks_text()),
    }


if __name__ == "__main__":
    for path, text in documents().items():
        path.write_text(text)
