"""The order of systems in each round, and how many times better ours is in each. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.stats import spread


def rotated(names: Sequence[str], index: int) -> list[str]:
    """Returns a round's order. Each round begins with the next system, so that none is always first."""
    start = index % len(names)
    return [*names[start:], *names[:start]]


def ratios(
    ours: str,
    more_is_better: Mapping[str, bool],
    rounds: Sequence[Mapping[str, Mapping[str, float]]],
    floors: Mapping[str, float] | None = None,
) -> dict[str, dict[str, Message]]:
    """Returns how many times better ``ours`` is, by system and figure: each round's, and their spread.

    Our rate over theirs, or their time over ours: below 1 the other is better. A round counts if both
    were measured in it. There is no ratio if the divisor is 0.

    ``rounds``: of each, system -> figure -> value. Values below their floor in ``floors`` count as equal.
    """
    found: dict[str, dict[str, Message]] = {}
    for figure, more in more_is_better.items():
        floor = (floors or {}).get(figure, 0.0)
        by_system: dict[str, list[float]] = {}
        for measured in rounds:
            mine = measured.get(ours, {})
            for name, figures in measured.items():
                if name == ours or figure not in figures or figure not in mine:
                    continue
                above, below = max(floor, figures[figure]), max(floor, mine[figure])
                if more:
                    above, below = below, above
                if below > 0:
                    by_system.setdefault(name, []).append(above / below)
        for name, values in by_system.items():
            by_round = [round(value, 3) for value in values]
            found.setdefault(name, {})[figure] = {**spread(values), "rounds": by_round}
    return found
