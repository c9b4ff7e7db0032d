"""Figures of a run: medians, percentiles, rates. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

GIB = 1 << 30
MIB = 1 << 20
KIB = 1 << 10


def spread(values: Iterable[float], digits: int = 3) -> dict[str, float]:
    """Returns ``{min, median, max}``."""
    array = np.asarray(list(values), dtype=np.float64)
    return {
        "min": round(float(array.min()), digits),
        "median": round(float(np.median(array)), digits),
        "max": round(float(array.max()), digits),
    }


def percentiles(values: Iterable[float], digits: int = 3) -> dict[str, float]:
    """Returns ``{p50, p90, p99}``, interpolated linearly."""
    found = np.percentile(np.asarray(list(values), dtype=np.float64), [50, 90, 99])
    return dict(zip(("p50", "p90", "p99"), found.round(digits).tolist(), strict=True))


def median(values: Iterable[float], digits: int = 3) -> float:
    """Returns the median, rounded."""
    return round(float(np.median(np.asarray(list(values), dtype=np.float64))), digits)


def gb_per_s(nbytes: int, elapsed_ns: float) -> float:
    """Returns a rate in units of 1e9 bytes a second."""
    return nbytes / max(elapsed_ns, 1.0)


def ideal_finish_ns(released_ns: list[int], layers_nbytes: list[int], limit_gb_per_s: float) -> int:
    """Returns when a mover at the limit's rate has the last layer in place.

    Parameters
    ----------
    released_ns
        When each layer could be moved, in order; a transfer of finished pages repeats its start.
    layers_nbytes
        Bytes of each of them.
    """
    at = 0.0
    for released, nbytes in zip(released_ns, layers_nbytes, strict=True):
        at = max(at, float(released)) + nbytes / limit_gb_per_s
    return int(at)
