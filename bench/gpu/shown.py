"""What `make gpu-check` found, whatever parts of it are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, Final

from kvxfer.bench.report.document import Part, Table, Words

# What is asked of a trigger from a stream to an agent that spins.
_TRIGGER_US: Final = 5.0
_ASKED_OF: Final = "store, spinning"


def parts(result: dict[str, Any]) -> Iterator[Part]:
    """Yields tables and lines; the last line is the verdict."""
    yield Words(
        f"{result['gpu']}, CUDA {result['driver']}, torch {result['torch']}, "
        f"cuda-core {result['cuda-core']}, {result['date']}: copies of {result['total_mib']} MiB, "
        f"medians of {result['rounds']} rounds",
        "bold",
    )
    missed = sum(_is_below(row) for row in result["row"]) + sum(map(_is_late, result["trigger"]))
    yield from _table(result["tests"], ("tests", "passed", "skipped", "wrong"), _tests)
    if result["row"]:
        yield Words("GB/s count bytes read and written on the device, and bytes moved to or from the host")
    for group, rows_of in groupby(result["row"], key=lambda row: row["group"]):
        head: tuple[str, ...] = (group, "GB/s", "of limit", "from - to", "asked", "submit us")
        yield from _table(list(rows_of), head, _copy)
    head = ("from a stream's store to the first byte that waits for it", "p50 us", "p99 us")
    yield from _table(result["trigger"], head, _delay)
    head = ("litmus: wrong words", "at host", "behind a wait", "of host", "rounds")
    yield from _table(result["litmus"], head, _litmus)
    yield from (Words(f"not run: {row['words']}") for row in result["not_run"])
    yield from (Words(f"WRONG: {row['words']}", "bad") for row in result["wrong"])
    yield Words(_verdict(result, missed), "bold")


def _is_below(row: dict[str, Any]) -> bool:
    return bool(row["ratio"] < row["asked"])


def _is_late(row: dict[str, Any]) -> bool:
    return bool(row["name"] == _ASKED_OF and row["p50_us"] > _TRIGGER_US)


def _table(
    found: list[dict[str, Any]], head: tuple[str, ...], cells: Callable[[dict[str, Any]], tuple[str, ...]]
) -> Iterator[Part]:
    if found:
        yield Table(head, [cells(row) for row in found])


def _tests(row: dict[str, Any]) -> tuple[str, ...]:
    return row["file"], str(row["num_passed"]), str(row["num_skipped"]), str(len(row["wrong"]))


def _delay(row: dict[str, Any]) -> tuple[str, ...]:
    return row["name"], f"{row['p50_us']:.1f}{' *' if _is_late(row) else ''}", f"{row['p99_us']:.1f}"


def _litmus(row: dict[str, Any]) -> tuple[str, ...]:
    return row["name"], *(str(row[count]) for count in ("at_host", "at_stream", "of_host", "num_rounds"))


def _copy(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["name"],
        f"{row['gb_per_s']:.1f}",
        f"{row['ratio']:.3f}",
        f"{row['least']:.2f} - {row['most']:.2f}",
        f"{row['asked']:.2f}{' *' if _is_below(row) else ''}" if row["asked"] else "",
        f"{row['submit_us']:.0f}" if row["submit_us"] else "",
    )


def _verdict(result: dict[str, Any], missed: int) -> str:
    num_wrong, num_not_run = len(result["wrong"]), len(result["not_run"])
    wrong = f"{num_wrong} WRONG" if num_wrong else "nothing is wrong"
    if not result["row"]:
        reached = "no copy was measured"
    else:
        reached = (
            f"{missed} figures miss their targets (*)"
            if missed
            else "all measured figures reach their targets"
        )
    return f"{wrong}; {reached}" + (f"; {num_not_run} not run" if num_not_run else "")
