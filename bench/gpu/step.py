"""A step of ``make gpu-check``: a process of its own, which ends within a bound whatever its kernels do."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# What a process has to say where its threads stand, and then to end, when its time is up.
_LAST_WORDS_S: Final = 10.0
_END_S: Final = 5.0
#: Of a log, what is shown where a step failed.
SHOWN_LINES: Final = 25
_SHOWN_COLUMNS: Final = 160
# What faulthandler begins with.
_LOST: Final = "Fatal Python error"


@dataclass(frozen=True, slots=True)
class Step:
    """A program with its arguments; ``name`` is its log's. Within less than ``least_s`` it is not begun."""

    name: str
    command: tuple[str, ...]
    most_s: float
    least_s: float = 15.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a step: its exit status (None where its time was up), and its standard output.

    ``log`` has that, too, and its standard error.
    """

    status: int | None
    taken_s: float
    output: str
    log: Path

    def last_lines(self) -> str:
        """Returns the end of what it said, for who sees no log; of a lost process, where it stood."""
        text = self.log.read_text(errors="replace")
        lost = text.find(_LOST)
        lines = text[max(lost, 0) :].splitlines()
        shown = lines[:SHOWN_LINES] if lost >= 0 else lines[-SHOWN_LINES:]
        return "\n".join(f"    {line[:_SHOWN_COLUMNS]}" for line in shown)


def run(
    step: Step, left_s: float, folder: Path, environment: Mapping[str, str] | None = None
) -> Outcome | None:
    """Runs a step in a process of its own, which ends within its bound and the time that is left.

    When its time is up it is asked where its threads stand (Python's faulthandler, in the log), then ended
    with all that it started. Returns None where too little time is left to begin.
    """
    if left_s < step.least_s:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(letter if letter.isalnum() else "-" for letter in step.name)
    log, said = folder / f"{name}.log", folder / f"{name}.out"
    began = time.monotonic()
    with log.open("wb") as errors, said.open("wb") as output:
        process = subprocess.Popen(
            step.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env={**os.environ, **(environment or {}), "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(min(step.most_s, left_s))
        except subprocess.TimeoutExpired:
            status = None
            _end(process)
        except BaseException:
            _end_at_once(process)
            raise
        else:
            # What it started and left behind holds the GPU's memory.
            _signal(process, signal.SIGKILL)
    text = said.read_text(errors="replace")
    with log.open("a", errors="replace") as file:
        file.write(text)
    return Outcome(status, time.monotonic() - began, text, log)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGABRT)
    try:
        process.wait(_LAST_WORDS_S)
    except subprocess.TimeoutExpired:
        pass
    _end_at_once(process)


def _end_at_once(process: subprocess.Popen[bytes]) -> None:
    _signal(process, signal.SIGKILL)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        pass  # in the driver, which does not let go: nothing can be done about it, and others go on


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass
