"""Parts of a report as one HTML page that loads nothing: for telephones and desks, light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from kvxfer.bench.errors import BenchError
from kvxfer.bench.report import axis
from kvxfer.bench.report.axis import Axis
from kvxfer.bench.report.document import Part, Table, Words
from kvxfer.bench.report.plots import Mark, Plot

_STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --back: #fff; --dim: #57606a; --line: #d0d7de;
  --good: #116329; --bad: #a40e26; --warn: #7d4e00; --unclear: #57606a; --run: #0550ae;
  --waits: #8c959f; --moves: #0550ae; --tells: #bc4c00; --far: #bc4c00; }
@media (prefers-color-scheme: dark) { :root {
  --text: #e6edf3; --back: #0d1117; --dim: #9198a1; --line: #30363d;
  --good: #56d364; --bad: #ff7b72; --warn: #e3b341; --unclear: #9198a1; --run: #79c0ff;
  --waits: #6e7681; --moves: #79c0ff; --tells: #ffa657; --far: #ffa657; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back);
  max-width: 72rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; } .dim, figcaption { color: var(--dim); font-size: .9rem; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums;
  overflow-wrap: normal; }
th, td { border-bottom: 1px solid var(--line); padding: .2rem .6rem; text-align: left; }
th { white-space: nowrap; }
td { min-width: 9rem; } td.number { min-width: 0; } .number { text-align: right; white-space: nowrap; }
figure { margin: 1rem 0; }
.row { display: grid; grid-template-columns: minmax(8rem, 20rem) 1fr; gap: 0 1rem; align-items: center;
  font-size: .9rem; padding: .1rem 1rem .1rem 0; }
.track { position: relative; height: 1.2rem; }
.track i { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--line); }
.track i.one { background: var(--text); width: 2px; }
.track u { position: absolute; top: .35rem; height: .5rem; min-width: 2px; }
.track u.dot { width: .5rem; margin-left: -.25rem; border-radius: 50%; }
.track b { position: absolute; font-weight: normal; transform: translateX(-50%); white-space: nowrap; }
.track b.first { transform: none; } .track b.last { transform: translateX(-100%); }
.legend { font-size: .9rem; } .legend span { margin-right: 1.2rem; white-space: nowrap; }
.legend u { display: inline-block; width: .7rem; height: .7rem; margin-right: .4rem; }
@media (max-width: 40rem) { .row { grid-template-columns: 1fr; } .number, th { padding: .2rem .35rem; } }
"""
# Percent of an axis.
_AT_END = 4
_KINDS = ("good", "bad", "unclear", "run", "waits", "moves", "tells", "far")


def write(path: Path, title: str, parts: Iterable[Part | Plot]) -> None:
    """Writes the page; raises where it cannot be written."""
    text = "\n".join(_page(title, parts))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--html {path} cannot be written: {error.strerror}; name another file") from error


def _page(title: str, parts: Iterable[Part | Plot]) -> Iterator[str]:
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    colours = "\n".join(f"u.{kind} {{ background: var(--{kind}); }}" for kind in _KINDS)
    yield f"<title>{escape(title)}</title>\n<style>{_STYLE}{colours}\n</style>\n</head>\n<body>"
    yield f"<h1>{escape(title)}</h1>"
    for part in parts:
        if isinstance(part, Table):
            yield from _table(part)
        elif isinstance(part, Plot):
            yield from _plot(part)
        elif part.style == "bold":
            yield f"<h2>{escape(part.text)}</h2>"
        else:
            yield f'<p class="{part.style}">{escape(part.text)}</p>'
    yield "</body>\n</html>\n"


def _table(table: Table) -> Iterator[str]:
    rows = [row for row in table.rows if row]
    kinds = [
        "number" if place and name and not any(isinstance(row[place], Words) for row in rows) else ""
        for place, name in enumerate(table.head)
    ]
    heads = (
        f'<th scope="col" class="{kind}">{escape(name)}</th>'
        for kind, name in zip(kinds, table.head, strict=True)
    )
    # A reader without a pointer scrolls it, too.
    yield f'<div class="wide" tabindex="0"><table>\n<thead><tr>{"".join(heads)}</tr></thead>\n<tbody>'
    for row in rows:
        cells = (_cell(cell, kind) for cell, kind in zip(row, kinds, strict=True))
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"


def _cell(cell: str | Words, kind: str) -> str:
    text, style = (cell, "") if isinstance(cell, str) else (cell.text, cell.style)
    # Words that are judged wrap; figures do not.
    classes = style if style else kind
    return f'<td class="{classes}">{escape(text)}</td>'


def _plot(plot: Plot) -> Iterator[str]:
    yield '<figure class="plot">'
    if drawn := plot.drawn():
        items = (f'<span><u class="{kind}"></u>{escape(words)}</span>' for kind, words in drawn.items())
        yield f'<div class="legend">{"".join(items)}</div>'
    ticks = "".join(f'<i style="left:{plot.axis.percent(tick):.2f}%"></i>' for tick in plot.axis.ticks)
    ticks += f'<i class="one" style="left:{plot.axis.percent(plot.line):.2f}%"></i>'
    for row in plot.rows:
        marks = "".join(_mark(plot, mark) for mark in row.marks)
        track = f'<span class="track">{ticks}{marks}</span>'
        yield f'<div class="row"><span>{escape(row.label)}</span>{track}</div>'
    labels = "".join(_tick(plot.axis, tick) for tick in plot.axis.ticks)
    unit = f'<span class="dim">{escape(plot.axis.unit)}</span>'
    yield f'<div class="row axis">{unit}<span class="track">{labels}</span></div>'
    yield f"<figcaption>{escape(plot.caption)}</figcaption></figure>"


def _tick(of: Axis, tick: float) -> str:
    at = of.percent(tick)
    # A label at an end would stick out of a narrow screen.
    place = "first" if at < _AT_END else "last" if at > 100 - _AT_END else ""
    return f'<b class="{place}" style="left:{at:.2f}%">{axis.words(tick)}</b>'


def _mark(plot: Plot, mark: Mark) -> str:
    left, right = plot.axis.percent(mark.low), plot.axis.percent(mark.high)
    words = (
        axis.words(mark.low)
        if mark.low == mark.high
        else f"{axis.words(mark.low)} to {axis.words(mark.high)}"
    )
    if mark.low == mark.high:
        return f'<u class="dot {mark.kind}" style="left:{left:.2f}%" title="{words}"></u>'
    return f'<u class="{mark.kind}" style="left:{left:.2f}%;width:{right - left:.2f}%" title="{words}"></u>'
