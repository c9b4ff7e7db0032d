"""What a figure is called in a table: words and a unit instead of a result's keys. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Keys whose words are not those that they are made of.
_WORDS = {
    "cpu_s_per_gib": "processor time",
    "gb_per_s": "rate",
    "hidden_share": "share moved while prefill computed",
    "idle_cpu_cores": "processor when idle",
    "limit_last_layer_ms": "last layer at the limit's rate",
    "limit_nt": "limit with non-temporal stores",
    "limit_nt_ratio": "ratio to the limit with non-temporal stores",
    "limit_ratio": "ratio to the limit",
    "ratio_to_plain": "ratio to a plain copy",
    "rss_mib": "resident memory",
}
# Longer ends before those that end them.
_UNITS = (
    ("_s_per_gib", "s/GiB"),
    ("_ns_per_page", "ns/page"),
    ("gb_per_s", "GB/s"),
    ("_gb_s", "GB/s"),
    ("_per_s", "1/s"),
    ("_cores", "cores"),
    ("_ms", "ms"),
    ("_us", "us"),
    ("_ns", "ns"),
    ("_s", "s"),
    ("_kib", "KiB"),
    ("_mib", "MiB"),
    ("_gib", "GiB"),
)
#: Times of these count from the end of prefill; before it they are below 0.
_STAGES = "stages_ms"
# Of a spread the median speaks for the run, and is not named.
_MEDIAN = "median"
_ROW = re.compile(r"(?P<list>\w+) (?:\[(?P<row>.*)\] )?(?P<name>[^ ]+)")


def label(figure: str) -> tuple[str, str]:
    """Returns what a figure is called, and its unit, ``""`` for a ratio or a count."""
    row = _ROW.fullmatch(figure)
    name = row["name"] if row else figure
    parts = [part for part in name.split(".") if part != _MEDIAN]
    units = [unit for part in parts if (unit := _unit(part))]
    if is_stage(figure):
        words = [*(_words(part) for part in parts[1:]), "from the end of prefill"]
    else:
        words = [_words(part) for part in parts]
    if row:
        words += [part for part in ("" if row["list"] == "rows" else row["list"], row["row"]) if part]
    return ", ".join(words).replace("_", " "), units[-1] if units else ""


def is_stage(figure: str) -> bool:
    """Whether a figure is a time from the end of prefill."""
    return figure.startswith(f"{_STAGES}.")


def beside_prefill(figure: str, values: Iterable[float]) -> tuple[str, list[float]]:
    """Returns a stage's words and times without a sign, where all of them lie before the end of prefill."""
    words, taken = label(figure)[0], list(values)
    if is_stage(figure):
        end = "from the end of prefill"
        if max(taken) < 0:
            return words.replace(end, "before prefill ended"), [-value for value in taken]
        if min(taken) >= 0:
            return words.replace(end, "after prefill ended"), taken
    return words, taken


def _unit(part: str) -> str:
    return next((unit for end, unit in _UNITS if part.endswith(end)), "")


def _words(part: str) -> str:
    if part in _WORDS:
        return _WORDS[part]
    for end, unit in _UNITS:
        if unit and part.endswith(end):
            return part.removesuffix(end).rstrip("_") or "rate"
    return part
