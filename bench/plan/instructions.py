"""Instructions for each page and each transfer, counted by callgrind: alike on every run and machine.

``make instructions`` builds what is counted and runs this. Costs are differences between runs of
different sizes, so what a process does once does not count::

    python -m kvxfer.bench.plan.instructions build/plain/bench/native/move_pages
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

from kvxfer.bench.errors import BenchError

_TRANSPORT = "loopback"
_FEW_PAGES, _MANY_PAGES = 1024, 8192
_FEW_TRANSFERS, _MANY_TRANSFERS = 10, 410
_TIMEOUT_S = 300.0


def count(program: str, transport: str, num_pages: int, page_nbytes: int, num_transfers: int) -> int:
    """Returns the instructions of one run of ``move_pages``, both agents and all threads together."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise BenchError("valgrind is not installed: apt install valgrind")
    sizes = [str(number) for number in (num_pages, page_nbytes, num_transfers)]
    done = subprocess.run(
        [valgrind, "--tool=callgrind", "--callgrind-out-file=/dev/null", program, transport, *sizes],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode != 0 or found is None:
        last = done.stderr.strip().splitlines()[-1:] or ["nothing was said"]
        raise BenchError(f"{program} under callgrind ended with {done.returncode}: {last[0]}")
    return int(found[1])


def measure(program: str) -> dict[str, float]:
    """Returns the counts, rounded to what repeats."""
    figures: dict[str, float] = {}
    for kib in (4, 32):
        few, many = (count(program, _TRANSPORT, pages, kib << 10, 1) for pages in (_FEW_PAGES, _MANY_PAGES))
        figures[f"per_page_{kib}_kib"] = round((many - few) / (_MANY_PAGES - _FEW_PAGES))
    few, many = (count(program, _TRANSPORT, 1, 4096, number) for number in (_FEW_TRANSFERS, _MANY_TRANSFERS))
    figures["per_transfer"] = round((many - few) / (_MANY_TRANSFERS - _FEW_TRANSFERS), -2)
    return figures


def main(arguments: list[str]) -> int:
    """Prints one JSON object."""
    if len(arguments) != 1:
        print("usage: python -m kvxfer.bench.plan.instructions MOVE_PAGES", file=sys.stderr)
        return 2
    try:
        print(json.dumps({"bench": "instructions", "transport": _TRANSPORT, **measure(arguments[0])}))
    except (BenchError, subprocess.TimeoutExpired) as error:
        print(f"kvxfer: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
