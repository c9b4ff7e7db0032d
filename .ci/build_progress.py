"""Reads what a build prints, keeps it in a file, and says how far it is: ``build | build_progress.py LOG``.

Ninja begins each step's line with ``[12/87]``. On a terminal one line is drawn anew; a file gets one a tenth.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

STEP = re.compile(r"^\s*\[(\d+)/(\d+)\]")
# Fewer are no build: ninja looks at its folders first.
FEWEST_STEPS = 5


def follow(lines: Iterable[str], log: TextIO, out: TextIO) -> None:
    """Keeps each line, and says how far the build is."""
    on_terminal, said, open_line = out.isatty(), -1, False
    for line in lines:
        log.write(line)
        log.flush()
        if (found := STEP.match(line)) is None:
            continue
        done, total = map(int, found.groups())
        if total < FEWEST_STEPS:
            continue
        words = f"  {done} of {total} steps"
        if on_terminal:
            print(f"\r{words}", end="", file=out, flush=True)
            open_line = True
        elif (tenth := 10 * done // total) != said:
            print(words, file=out, flush=True)
            said = tenth
    if open_line:
        print(file=out, flush=True)


if __name__ == "__main__":
    with Path(sys.argv[1]).open("w") as log:
        follow(sys.stdin, log, sys.stdout)
