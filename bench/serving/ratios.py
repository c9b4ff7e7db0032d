"""How many times better kvxfer serves than another, round by round. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.stats import spread
from kvxfer.bench.serving.systems import OURS

#: Figures that are set beside ours, and whether more is better.
COMPARED: Final[Mapping[str, bool]] = {
    "first_token_ms": False,
    "between_tokens_ms": False,
    "own_ms": False,
    "load_ms": False,
    "decide_ms": False,
    "hold_ms": False,
    "give_back_ms": False,
    "prefill_step_us": False,
    "decode_step_us": False,
    "output_tokens_per_s": True,
    "processor_s": False,
}


def ratios(rounds: Mapping[str, Mapping[int, Mapping[str, float]]]) -> dict[str, dict[str, Message]]:
    """Returns how many times better kvxfer is, by system and figure: each round's, and their spread.

    Their time over ours, or our rate over theirs: below 1 the other is better.
    """
    ours = rounds.get(OURS, {})
    found: dict[str, dict[str, Message]] = {}
    for name, theirs in rounds.items():
        if name == OURS:
            continue
        for figure, more_is_better in COMPARED.items():
            values = []
            for number in sorted(ours.keys() & theirs.keys()):
                if figure not in ours[number] or figure not in theirs[number]:
                    continue
                above, below = theirs[number][figure], ours[number][figure]
                if more_is_better:
                    above, below = below, above
                if below > 0:
                    values.append(above / below)
            if values:
                by_number: list[Any] = [round(value, 3) for value in values]
                found.setdefault(name, {})[figure] = {**spread(values), "rounds": by_number}
    return found
