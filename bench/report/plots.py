"""Plots as SVG within a page, by matplotlib: numbers and labels in, markup out."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import NullFormatter, ScalarFormatter

from kvxfer.bench.report.document import Figure

_WIDTH_INCHES, _ROW_INCHES = 9.5, 0.24
_MAX_LABEL = 48
_COLOURS = {"good": "#12805c", "bad": "#b3261e"}
_NEUTRAL = "#667788"
# Text as text: it can be searched for, and a page stays small. Nothing tells when and by what it was made.
_SETTINGS: Any = {"svg.fonttype": "none", "font.size": 8, "font.family": "sans-serif"}
_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of `bars`: segments ``(start, end, name)`` and points ``(at, name)``; names are in the legend."""

    label: str
    segments: Sequence[tuple[float, float, str]]
    points: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True, slots=True)
class Interval:
    """A row of `intervals`: a value between its bounds; ``style`` is ``"good"``, ``"bad"`` or ``""``."""

    label: str
    low: float
    at: float
    high: float
    style: str = ""


def bars(rows: Sequence[Bar], unit: str) -> str:
    """Returns horizontal bars of segments on one axis, e.g. a timeline with one row a request."""
    canvas, axes = _rows([row.label for row in rows])
    named = [name for row in rows for *_, name in (*row.segments, *row.points)]
    colours = {name: f"C{place}" for place, name in enumerate(dict.fromkeys(named))}
    for y, row in enumerate(rows):
        for start, end, name in row.segments:
            axes.barh(y, end - start, 0.7, left=start, color=colours[name], alpha=0.75, label=_plain(name))
        for at, name in row.points:
            axes.plot(at, y, "o", color=colours[name], markersize=4, label=_plain(name))
    axes.set_xlabel(unit)
    by_name = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(
        by_name.values(), by_name.keys(), ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False
    )
    return _svg(canvas)


def intervals(rows: Sequence[Interval], unit: str) -> str:
    """Returns values between their bounds on a logarithmic axis, with a line at 1; all above 0."""
    canvas, axes = _rows([row.label for row in rows])
    for y, row in enumerate(rows):
        bounds = [[row.at - row.low], [row.high - row.at]]
        axes.errorbar([row.at], [y], xerr=bounds, fmt="o", color=_COLOURS.get(row.style, _NEUTRAL))
    axes.axvline(1.0, color="black", linestyle="--", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(unit)
    return _svg(canvas)


def runs(figures: Mapping[str, Sequence[float]]) -> Figure:
    """Returns the runs of each figure as dots, each over its own median."""
    canvas, axes = _rows(list(figures))
    for y, values in enumerate(figures.values()):
        middle = float(np.median(values)) or 1.0
        axes.plot(np.asarray(values) / middle, [y] * len(values), "o", color="C0", alpha=0.5, markersize=4)
    axes.axvline(1.0, color="black", linestyle="--", linewidth=0.8)
    return Figure(_svg(canvas), "Each run over the median of its figure.")


def _rows(labels: Sequence[str]) -> tuple[Canvas, Any]:
    """Returns a canvas with a row for each label, the first one on top."""
    with mpl.rc_context(_SETTINGS):
        canvas = Canvas(figsize=(_WIDTH_INCHES, 0.8 + _ROW_INCHES * len(labels)), layout="constrained")
        axes = canvas.subplots()
    shown = [label if len(label) <= _MAX_LABEL else f"{label[: _MAX_LABEL - 1]}…" for label in labels]
    axes.set_yticks(range(len(labels)), [_plain(label) for label in shown])
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.4)
    return canvas, axes


def _plain(text: str) -> str:
    # Between two $ matplotlib reads a formula.
    return text.replace("$", r"\$")


def _svg(canvas: Canvas) -> str:
    written = io.StringIO()
    with mpl.rc_context(_SETTINGS):
        canvas.savefig(written, format="svg", metadata=_METADATA)
    text = written.getvalue()
    # Without what only a file of its own has: the declarations before, which name addresses.
    return text[text.index("<svg") :]
