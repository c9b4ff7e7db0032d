"""What `make gpu-check` found, as lines of plain text."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, Final

# What is asked of a trigger from a stream to an agent that spins.
_TRIGGER_US: Final = 5.0
_ASKED_OF: Final = "store, spinning"


def table(result: dict[str, Any]) -> str:
    """Returns the table of a result, whatever parts of it are there."""
    return "\n".join(_lines(result))


def _lines(result: dict[str, Any]) -> Iterator[str]:
    yield (
        f"\n{result['gpu']}, CUDA {result['driver']}, torch {result['torch']}, "
        f"cuda-core {result['cuda-core']}, {result['date']}: copies of {result['total_mib']} MiB, "
        f"medians of {result['rounds']} rounds"
    )
    yield from _tests(result)
    missed = 0
    if result["row"]:
        yield "GB/s are read + written on the device, moved once to and from the host"
        yield f"{'':36}{'GB/s':>9}{'of limit':>10}{'(from - to)':>16}{'asked':>8}{'submit us':>11}"
        missed += yield from _rows(result["row"])
    if result["beside products"]:
        yield "a copy and matrix products together, times slower than alone"
    for row in result["beside products"]:
        yield (
            f"  {row['priority']} priority, {row['num_ctas']:2} CTAs"
            f"{'':8}products {row['products']:.2f}, copy {row['copy']:.2f}"
        )
    if result["host CTAs"]:
        yield "pages between device and host memory, as calibrated: GB/s to and from the host, by CTAs"
    for row in result["host CTAs"]:
        rates = " and ".join(
            "-" if rate is None else f"{rate:.1f}" for rate in (row["to_host"], row["from_host"])
        )
        yield f"  {row['num_ctas']:<34}{rates:>16}{' staging takes these' if row['is_chosen'] else ''}"
    if result["host copy"]:
        yield "pages between device and host memory, as calibrated: by copy engines"
    for choice in result["host copy"]:
        way = f"{'to' if choice['to_host'] else 'from'} the host, {choice['form']}"
        loose = "" if choice["aligned"] else " not on 16 bytes"
        least = choice["least_nbytes"]
        yield f"  {way + loose:34}{'never' if least is None else f'from {least // 1024} KiB on':>16}"
    if result["trigger"]:
        yield "from a stream's store to the first byte of a transfer that waits for it, us"
    for row in result["trigger"]:
        late = row["name"] == _ASKED_OF and row["p50_us"] > _TRIGGER_US
        missed += late
        asked = "" if row["name"] != _ASKED_OF else f"{_TRIGGER_US:8.1f}{' *' if late else ''}"
        yield f"  {row['name']:34}p50 {row['p50_us']:.1f}, p99 {row['p99_us']:.1f}{asked}"
    if result["command"]:
        yield "a transfer of 16 KiB that a kernel starts, as it sees it, us"
    for row in result["command"]:
        yield f"  {row['name']:34}p50 {row['p50_us']:.1f}, p99 {row['p99_us']:.1f}"
    if result["litmus"]:
        yield "kernels to host to stream and back: words that were not as they had been stored"
    for row in result["litmus"]:
        yield (
            f"  {row['name']:34}{row['at_host']} at the host, {row['at_stream']} behind a stream's wait, "
            f"{row['of_host']} of the host's, in {row['num_rounds']} rounds"
        )
    for row in result["checkers"]:
        yield f"compute-sanitizer, {row['name']}: {row['words']}"
    for row in result["not_run"]:
        yield f"not run: {row['words']}"
    for row in result["wrong"]:
        yield f"WRONG: {row['words']}"
    measured = bool(result["row"])
    yield _verdict(len(result["wrong"]), missed if measured else None, len(result["not_run"]))


def _tests(result: dict[str, Any]) -> Iterator[str]:
    for row in result["tests"]:
        skipped = f", {row['num_skipped']} skipped" if row["num_skipped"] else ""
        wrong = f", {len(row['wrong'])} wrong" if row["wrong"] else ""
        yield f"  {row['file']:34}{row['num_passed']} passed{skipped}{wrong}"


def _rows(rows: list[dict[str, Any]]) -> Generator[str, None, int]:
    """Yields the lines of the rates; returns how many miss what was asked."""
    group, missed = "", 0
    for row in rows:
        if row["group"] != group:
            group = row["group"]
            yield group
        late = row["ratio"] < row["asked"]
        missed += late
        spread = f"({row['least']:.2f} - {row['most']:.2f})"
        asked = f"{row['asked']:.2f}{' *' if late else ''}" if row["asked"] else ""
        submit = f"{row['submit_us']:.0f}" if row["submit_us"] else ""
        rate = f"{row['gb_per_s']:9.1f}{row['ratio']:10.3f}"
        yield f"  {row['name']:34}{rate}{spread:>16}{asked:>8}{submit:>11}"
    return missed


def _verdict(num_wrong: int, missed: int | None, num_not_run: int) -> str:
    wrong = f"{num_wrong} WRONG" if num_wrong else "nothing is wrong"
    if missed is None:
        reached = "no copy was measured"
    else:
        reached = f"{missed} of what was asked is below (*)" if missed else "what was measured is as asked"
    left_out = f"; {num_not_run} not run" if num_not_run else ""
    return f"\n{wrong}; {reached}{left_out}"
