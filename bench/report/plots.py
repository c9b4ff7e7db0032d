"""Plots as inline SVG. Pure: numbers and labels in, markup out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from kvxfer.bench.report.html import Markup

_WIDTH = 820
_LABEL_WIDTH = 230
_ROW_HEIGHT = 20
_AXIS_HEIGHT = 34
_PAD = 14
#: Colours of series and phases in their order (html.py has their values).
COLOURS = ("var(--a)", "var(--b)", "var(--c)", "var(--d)")


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of `bars`: segments ``(start, end, colour index)`` and points ``(at, colour index)``.

    Those of ``inner`` are half as high and lie on the others.
    """

    label: str
    segments: Sequence[tuple[float, float, int]]
    points: Sequence[tuple[float, int]] = ()
    inner: Sequence[tuple[float, float, int]] = ()


@dataclass(frozen=True, slots=True)
class Interval:
    """A row of `intervals`: a value between its bounds; ``kind`` is ``"good"``, ``"bad"`` or ``""``."""

    label: str
    low: float
    at: float
    high: float
    kind: str = ""


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps values to the horizontal axis, linearly or by their logarithm."""

    low: float
    high: float
    left: float
    right: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.left + (value - low) / (high - low) * (self.right - self.left)


def strip(values: Sequence[float], low: float, high: float) -> Markup:
    """Returns the runs of one figure as dots between ``low`` and ``high``, small enough for a table."""
    width, height = 150, 16
    scale = _Scale(low, high if high > low else low + 1, 6, width - 6)
    dots = "".join(
        f'<circle cx="{scale(value):.1f}" cy="8" r="3.2" fill="var(--mark)" fill-opacity="0.55"/>'
        for value in values
    )
    line = f'<line x1="6" y1="8" x2="{width - 6}" y2="8" stroke="var(--line)"/>'
    return _svg(width, height, line + dots)


def bars(rows: Sequence[Bar], unit: str, legend: Sequence[str] = (), marks: Sequence[float] = ()) -> Markup:
    """Returns horizontal bars of segments on one axis, e.g. a timeline with one row a request.

    ``legend`` names the colours in their order, an empty name leaves one out; ``marks`` draws vertical lines.
    """
    ends = [end for row in rows for start, stop, _ in (*row.segments, *row.inner) for end in (start, stop)]
    ends += [at for row in rows for at, _ in row.points] + list(marks)
    scale = _scale_of(ends or [0.0])
    top = _ROW_HEIGHT + 6 if legend else 0
    parts = [_legend(legend)] if legend else []
    height = top + len(rows) * _ROW_HEIGHT
    parts += [_axis(scale, height, unit, top)]
    for number, row in enumerate(rows):
        y = top + number * _ROW_HEIGHT
        parts.append(_label(row.label, y))
        for inset, segments in ((3.0, row.segments), (6.5, row.inner)):
            for start, stop, colour in segments:
                width = max(1.0, scale(stop) - scale(start))
                parts.append(
                    f'<rect x="{scale(start):.1f}" y="{y + inset}" width="{width:.1f}" '
                    f'height="{_ROW_HEIGHT - 2 * inset:g}" fill="{COLOURS[colour % len(COLOURS)]}"/>'
                )
        parts += [
            f'<circle cx="{scale(at):.1f}" cy="{y + _ROW_HEIGHT / 2}" r="3.5" '
            f'fill="{COLOURS[colour % len(COLOURS)]}" stroke="var(--paper)"/>'
            for at, colour in row.points
        ]
    parts += [_vertical(scale(mark), top, height) for mark in marks]
    return _svg(_WIDTH, height + _AXIS_HEIGHT, "".join(parts))


def distribution(values: Sequence[float], unit: str, num_bins: int = 30) -> Markup:
    """Returns a histogram of the values."""
    low, high = min(values), max(values)
    width = (high - low) / num_bins or 1.0
    counts = [0] * num_bins
    for value in values:
        counts[min(num_bins - 1, int((value - low) / width))] += 1
    height = 110
    scale = _Scale(low, low + width * num_bins, _PAD, _WIDTH - _PAD)
    most = max(counts)
    parts = [
        f'<rect x="{scale(low + index * width):.1f}" y="{height * (1 - count / most):.1f}" '
        f'width="{(_WIDTH - 2 * _PAD) / num_bins - 1:.1f}" height="{height * count / most:.1f}" '
        'fill="var(--a)"/>'
        for index, count in enumerate(counts)
        if count
    ]
    return _svg(_WIDTH, height + _AXIS_HEIGHT, _axis(scale, height, unit, 0) + "".join(parts))


def intervals(rows: Sequence[Interval], unit: str, mark: float = 1.0) -> Markup:
    """Returns values between their bounds on a logarithmic axis, with a line at ``mark``; all above 0."""
    ends = [value for row in rows for value in (row.low, row.high)] + [mark / 1.05, mark * 1.05]
    scale = _Scale(min(ends) / 1.02, max(ends) * 1.02, _LABEL_WIDTH, _WIDTH - _PAD, log=True)
    height = len(rows) * _ROW_HEIGHT
    parts = [_axis(scale, height, unit, 0), _vertical(scale(mark), 0, height)]
    for number, row in enumerate(rows):
        y = number * _ROW_HEIGHT + _ROW_HEIGHT / 2
        colour = f"var(--{row.kind})" if row.kind else "var(--dim)"
        parts += [
            _label(row.label, number * _ROW_HEIGHT),
            f'<line x1="{scale(row.low):.1f}" y1="{y}" x2="{scale(row.high):.1f}" y2="{y}" '
            f'stroke="{colour}" stroke-width="2"/>',
            f'<circle cx="{scale(row.at):.1f}" cy="{y}" r="4" fill="{colour}"/>',
        ]
    return _svg(_WIDTH, height + _AXIS_HEIGHT, "".join(parts))


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Returns round numbers between ``low`` and ``high``, steps of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first = math.ceil(low / step)
    # Multiplied, not added up: 0.1 + 0.2 is no round number.
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _scale_of(values: Sequence[float]) -> _Scale:
    low, high = min(values), max(values)
    return _Scale(low, high if high > low else low + 1.0, _LABEL_WIDTH, _WIDTH - _PAD)


def _axis(scale: _Scale, y: float, unit: str, top: float) -> str:
    parts = []
    for tick in ticks(scale.low, scale.high):
        x = scale(tick)
        parts.append(
            f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{y}" stroke="var(--line)"/>'
            f'<text class="dim" x="{x:.1f}" y="{y + 14}" text-anchor="middle">{tick:g}</text>'
        )
    parts.append(
        f'<text class="dim" x="{(scale.left + scale.right) / 2:.0f}" y="{y + 29}" text-anchor="middle">'
        f"{escape(unit)}</text>"
    )
    return "".join(parts)


def _legend(names: Sequence[str]) -> str:
    parts, x = [], float(_LABEL_WIDTH)
    for index, name in enumerate(names):
        if not name:
            continue  # a colour that this plot does not use
        colour = COLOURS[index % len(COLOURS)]
        parts.append(
            f'<rect x="{x:.0f}" y="3" width="10" height="10" fill="{colour}"/>'
            f'<text x="{x + 14:.0f}" y="12">{escape(name)}</text>'
        )
        x += 30 + 6.5 * len(name)
    return "".join(parts)


def _label(text: str, y: float) -> str:
    shown = text if len(text) <= 40 else f"{text[:39]}…"
    return (
        f'<text x="{_LABEL_WIDTH - 8}" y="{y + _ROW_HEIGHT / 2 + 4:.0f}" text-anchor="end">'
        f"{escape(shown)}<title>{escape(text)}</title></text>"
    )


def _vertical(x: float, top: float, bottom: float) -> str:
    return (
        f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" '
        'stroke="var(--ink)" stroke-dasharray="4 3"/>'
    )


def _svg(width: float, height: float, content: str) -> Markup:
    return Markup(
        f'<svg role="img" viewBox="0 0 {width} {height}" width="{width}" height="{height}">{content}</svg>'
    )
