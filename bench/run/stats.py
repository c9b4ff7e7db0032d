"""Figures of a run: medians, percentiles, rates. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

GIB = 1 << 30
MIB = 1 << 20
KIB = 1 << 10


def spread(values: Iterable[float], digits: int = 3) -> dict[str, float]:
    """Returns ``{min, median, max}``."""
    found = np.percentile(list(values), [0, 50, 100]).round(digits).tolist()
    return dict(zip(("min", "median", "max"), found, strict=True))


def percentiles(values: Iterable[float], digits: int = 3) -> dict[str, float]:
    """Returns ``{p50, p90, p99}``, interpolated linearly."""
    found = np.percentile(list(values), [50, 90, 99]).round(digits).tolist()
    return dict(zip(("p50", "p90", "p99"), found, strict=True))


def median(values: Iterable[float], digits: int = 3) -> float:
    """Returns the median, rounded."""
    return round(float(np.median(list(values))), digits)


def median_ratio(ours: Iterable[float], theirs: Sequence[float]) -> float:
    """Returns the median of the ratios of what was measured in the same iterations."""
    return median(mine / its for mine, its in zip(ours, theirs, strict=True))
