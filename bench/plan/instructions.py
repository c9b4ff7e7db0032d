"""``kvxfer bench instructions``: instructions for each page and each transfer, counted by callgrind.

Alike on every machine: the fewest of some runs, since agents' own threads find time to look up in between,
and differences between runs of different sizes, so that what a process does once does not count.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from kvxfer.bench.errors import BenchError
from kvxfer.bench.report.document import Part, figures_table
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.course import Progress, Say, result_of
from kvxfer.bench.run.options import Option

FIGURES = {
    "per_page_4_kib": "instructions for a page of 4 KiB, both ends together",
    "per_page_32_kib": "instructions for a page of 32 KiB",
    "per_transfer": "instructions for a transfer of one page",
    "records_per_transfer": "additional instructions if both ends write records of it, taken 100 at a time",
}
_FEW_PAGES, _MANY_PAGES = 1024, 8192
_FEW_TRANSFERS, _MANY_TRANSFERS = 10, 410
_OF_A_BATCH = 100
# Of the thread that drives both ends alone: the agents' own threads find time to look up in between only
# because everything takes fifty times as long here, and that was a tenth of the count, now more, now less.
_OF_TRANSFERS = ("*move_all*",)
# Records cost less than one poll more or less.
_OF_RECORDS = ("kvxfer::Records::write*", "kvxfer::RecordRing::take*")
_RUNS = 5
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class InstructionsOptions:
    """Count instructions for each page and each transfer with callgrind; `make instructions` runs this.

    kvxfer bench instructions --format json
    """

    program: Annotated[str, Option("The program to run under callgrind.", value="FILE")] = (
        "build/plain/bench/native/move_pages"
    )


def run(options: InstructionsOptions, progress: Say) -> Message:
    """Counts, and returns `FIGURES` as one JSON object, rounded to what repeats."""

    def per(name: str, few: tuple[int, ...], many: tuple[int, ...], inside: tuple[str, ...] = ()) -> float:
        progress(Progress(0, 1, name))
        counted = [min(_count(options, sizes, inside) for _ in range(_RUNS)) for sizes in (few, many)]
        # One of the sizes differs.
        return (counted[1] - counted[0]) / (sum(many) - sum(few))

    def measure() -> Message:
        pages = {
            f"per_page_{kib}_kib": ((_FEW_PAGES, kib << 10, 1), (_MANY_PAGES, kib << 10, 1))
            for kib in (4, 32)
        }
        transfers = (1, 4096, _FEW_TRANSFERS), (1, 4096, _MANY_TRANSFERS)
        few, many = ((1, 4096, count, _OF_A_BATCH) for count in (_OF_A_BATCH, 5 * _OF_A_BATCH))
        return {
            **{name: round(per(name, *sizes)) for name, sizes in pages.items()},
            "per_transfer": round(per("per_transfer", *transfers, _OF_TRANSFERS), -2),
            "records_per_transfer": round(per("records_per_transfer", few, many, _OF_RECORDS)),
        }

    return result_of("instructions", options, measure)


def parts(result: Message) -> Iterator[Part]:
    """Yields what a result is shown as."""
    yield figures_table(result, FIGURES, ("",))


def _count(options: InstructionsOptions, sizes: tuple[int, ...], inside: tuple[str, ...]) -> int:
    """Returns the instructions of one run of ``move_pages``, both agents and all threads together.

    With ``inside`` those count alone that were run in these functions, and in what they called.
    """
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise BenchError("valgrind is not installed: apt install valgrind")
    counted = [valgrind, "--tool=callgrind", "--callgrind-out-file=/dev/null"]
    counted += [f"--toggle-collect={name}" for name in inside]
    try:
        done = subprocess.run(
            [*counted, options.program, "loopback", *map(str, sizes)],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"{options.program} under callgrind took longer than {_TIMEOUT_S:g} s") from error
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode != 0 or found is None:
        last = done.stderr.strip().splitlines()[-1:] or ["nothing was said"]
        raise BenchError(f"{options.program} under callgrind ended with {done.returncode}: {last[0]}")
    return int(found[1])
