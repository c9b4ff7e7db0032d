"""Ctrl-C in the middle of a run: what was measured is printed and kept, and the status says it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer.bench.report import results
from kvxfer.bench.run.interrupt import Interrupt

INTERRUPTED = 130


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["pages", "--total-mib", "4", "--iterations", "100000"], "pages 3/"),
        (
            ["handover", "--requests", "200", "--max-tokens", "64", "--prefill-ms-per-layer", "0.1"],
            "handover 60/",
        ),
        (["scale", "--series", "prefills", "--total-mib", "8", "--repeats", "1"], "scale 1/"),
    ],
)
def test_what_was_measured_is_kept(command: list[str], line: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "kvxfer.bench", *command, "--format", "json", "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        for said in process.stderr:
            if said.startswith(line):
                break
        else:
            pytest.fail(f"it never said {line}")
        process.send_signal(signal.SIGINT)
        printed, rest = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED, rest
    result = json.loads(printed)
    assert result["verified"] is True
    assert result["interrupted"] is True
    kept = results.read(tmp_path)
    assert not kept.warnings
    assert len(kept.records) == 1


def test_before_anything_is_measured_there_is_nothing_to_keep() -> None:
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.stops(3)
        with pytest.raises(KeyboardInterrupt):
            interrupt.stops(0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
