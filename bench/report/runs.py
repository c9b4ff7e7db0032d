"""Many kept results, gathered by bench and arguments into the figures of repeated runs. Pure.

At the top of a result and in a row of a list, a text, a whole number or a truth is an argument, and a
fraction is a figure; every number within an object is a figure. What the machine chose (`_FACTS`) is neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvxfer.bench.report import machine
from kvxfer.bench.report.results import Record
from kvxfer.bench.run.channel import Message

_FACTS = frozenset(
    {
        *("verified", "failure", "rails", "copy_kernel", "page_kind", "model_source", "name", "versions"),
        *("explain", "runs_per_pair", "smallest_run_nbytes"),
        *("piecewise_pieces", "piecewise_nbytes", "piecewise_layers", "piecewise_tokens"),
    }
)
# Fractions that were asked for.
_ARGUMENTS = frozenset({"timeout_s", "idle_s", "wait_s", "prefill_ms_per_layer"})
# Values of arguments that say nothing, and units at the end of their names.
_NO = frozenset({"", "False", "None"})
_UNITS = {"s": "s", "ms": "ms", "kib": "KiB", "mib": "MiB", "gib": "GiB", "nbytes": "bytes"}
# Of a spread the median speaks for the run; its ends belong to single iterations.
_SPREAD_ENDS = frozenset({"min", "max"})

_MORE_IS_BETTER = ("per_s", "gb_s", "ratio", "ratio_to_plain", "ratio_to_piecewise", "share", "fairness")
_LESS_IS_BETTER = ("_ms", "_us", "_mib", "_kib", "_ns_per", "cores", "rss", "instructions", "wake_ups")


@dataclass(frozen=True, slots=True)
class Kind:
    """What makes runs comparable: the bench and its arguments, in the order of the result."""

    bench: str
    arguments: tuple[tuple[str, str], ...]

    def in_words(self) -> str:
        """Returns the bench and what was given, on one line, values with their units."""
        given = ", ".join(_argument(name, value) for name, value in self.arguments if value not in _NO)
        return f"{self.bench}: {given}" if given else self.bench


def _argument(name: str, value: str) -> str:
    stem, _, unit = name.rpartition("_")
    if unit in _UNITS:
        return f"{stem.replace('_', ' ')} {value} {_UNITS[unit]}"
    if name.startswith("num_"):
        return f"{value} {name.removeprefix('num_').replace('_', ' ')}"
    words = name.replace("_", " ")
    return words if value == "True" else f"{words} {value}"


@dataclass(slots=True)
class Runs:
    """Runs of one kind. ``figures`` has one value a run for each figure that the run had."""

    kind: Kind
    figures: dict[str, list[float]] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    #: Runs whose bytes were wrong; they have no figures.
    failures: list[str] = field(default_factory=list)


def gather(records: Iterable[Record]) -> list[Runs]:
    """Returns the runs by kind, kinds in the order in which they first came."""
    found: dict[Kind, Runs] = {}
    for record in records:
        result = record.result
        kind = Kind(result["bench"], tuple(_arguments(result)))
        runs = found.setdefault(kind, Runs(kind))
        if result.get("verified") is False:
            runs.failures.append(str(result.get("failure", "not verified")))
        else:
            for name, value in figures(result):
                runs.figures.setdefault(name, []).append(value)
        runs.records.append(record)
    return list(found.values())


def figures(result: Message, prefix: str = "", *, is_row: bool = True) -> Iterator[tuple[str, float]]:
    """Yields the figures of a result, the names of nested ones joined by dots."""
    for name, value in result.items():
        if name in _FACTS or name in _ARGUMENTS or isinstance(value, bool):
            continue
        if "median" in result and name in _SPREAD_ENDS:
            continue
        if isinstance(value, float) or (isinstance(value, int) and not is_row):
            yield f"{prefix}{name}", float(value)
        elif isinstance(value, dict):
            yield from figures(value, f"{prefix}{name}.", is_row=False)
        elif isinstance(value, list):
            for row in (row for row in value if isinstance(row, dict)):
                label = ", ".join(f"{key} {text}" for key, text in _arguments(row))
                yield from figures(row, f"{prefix}{name} [{label}] " if label else f"{prefix}{name} ")


def machines_of(records: Iterable[Record]) -> list[str]:
    """Returns the machines that the records come from, in words."""
    return list(dict.fromkeys(machine.in_words(record.machine) for record in records))


def better(figure: str) -> int:
    """Returns 1 where more is better, -1 where less is, 0 where the name does not tell."""
    # The unit is the last part but for p50 and the like: "stages_ms.post.p50", "gb_per_s.median".
    name = figure.rpartition("] ")[2]
    for part in reversed(name.split(".")):
        # Before the times: "gb_per_s" ends as a time does. Processor time per byte is a cost.
        if "cpu" not in part and part.endswith(_MORE_IS_BETTER):
            return 1
        if any(part.endswith(end) or part.startswith(end) for end in _LESS_IS_BETTER) or "cpu" in part:
            return -1
    return 0


def _arguments(result: Message) -> Iterator[tuple[str, str]]:
    for name, value in result.items():
        if name in _FACTS or name == "bench":
            continue
        if isinstance(value, str | int) or (isinstance(value, float) and name in _ARGUMENTS):
            yield name, f"{value:g}" if isinstance(value, float) else str(value)
