"""What ``make demo`` prints while it builds: the progress, and the whole output if the build fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / ".ci" / "build_progress.py"
BUILD = "".join(f"  [{step}/40] Building CXX object file_{step}.o\n" for step in range(1, 41))


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        ("Obtaining file:///kvxfer\n", ""),
        ("[0/2] Re-checking globbed directories...\n", ""),
        ("[1/40] one\n[2/40] two\n[39/40] more\n", "  1 of 40 steps\n  39 of 40 steps\n"),
        (BUILD, "".join(f"  {step} of 40 steps\n" for step in (1, *range(4, 41, 4)))),
        ("[1/40] one\nfile.cpp:3: error: no\n", "  1 of 40 steps\n"),
    ],
)
def test_a_pipe_gets_a_line_for_each_tenth_and_the_log_gets_all(
    printed: str, said: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    done = subprocess.run(
        [sys.executable, PROGRAM, log], input=printed, capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout == said
    assert log.read_text() == printed
