"""Axes of plots: where values lie between two ends, and which ticks a reader needs. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# More do not fit beside each other on a telephone.
_MOST_TICKS = 5
# On both sides of 1, from the nearest.
_RATIOS = (
    *((0.99, 1.01), (0.98, 1.02), (0.95, 1.05), (0.9, 1.1), (0.8, 1.25), (2 / 3, 1.5), (0.5, 2.0)),
    *((1 / 3, 3.0), (0.2, 5.0), (0.1, 10.0), (0.03, 30.0), (0.01, 100.0), (0.001, 1000.0)),
)


@dataclass(frozen=True, slots=True)
class Axis:
    """From ``low`` to ``high``, in ``unit``; ``ticks`` are values within."""

    low: float
    high: float
    ticks: tuple[float, ...]
    unit: str
    is_log: bool = False

    def percent(self, value: float) -> float:
        """Returns where a value lies, 0 to 100 from left to right; what lies beyond an end is at the end."""
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.is_log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return 100 * (at - low) / (high - low)


def linear(low: float, high: float, unit: str) -> Axis:
    """Returns an axis with ticks at 1, 2 or 5 of a power of ten."""
    if high <= low:
        low, high = low - 0.5, high + 0.5
    step = 10.0 ** math.floor(math.log10((high - low) / _MOST_TICKS))
    step *= next(times for times in (1, 2, 5, 10) if (high - low) / (times * step) <= _MOST_TICKS)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return Axis(low, high, tuple(round(number * step, 12) for number in range(first, last + 1)), unit)


def ratios(values: Sequence[float], unit: str) -> Axis:
    """Returns a logarithmic axis around 1, about as long on both sides, with ticks on both; all above 0."""
    least, most = min(values, default=1.0), max(values, default=1.0)
    # The first pair beyond, so that the furthest value has a tick on its outer side.
    beyond = next(
        (place for place, (low, high) in enumerate(_RATIOS) if low < least and most < high), len(_RATIOS) - 1
    )
    pairs = _RATIOS[max(0, beyond - 1) : beyond + 1]
    lows, highs = zip(*pairs, strict=True)
    return Axis(min(least, lows[-1]), max(most, highs[-1]), (*reversed(lows), 1.0, *highs), unit, is_log=True)


def words(tick: float) -> str:
    """Returns a tick as it stands under an axis."""
    return f"{float(f'{tick:.3g}'):g}"
