"""Finds NIXL itself, for the tests that compare kvxfer's facade with it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.bench.compare.baseline import known_baselines

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def real_nixl() -> Callable[..., str]:
    """Runs a program with NIXL's own environment, and returns what it prints."""
    found = next(one for one in known_baselines() if one.software == "nixl")
    if not found.is_installed:
        pytest.skip("NIXL is not installed: `make baselines` installs it")

    def run(*arguments: str, timeout_s: float = 300.0, **environment: str) -> str:
        done = subprocess.run(
            [str(found.python), *arguments],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=ROOT,
            env={**os.environ, **environment},
            check=False,
        )
        found_lines = [line for line in done.stdout.splitlines() if line[:1] in ("[", "{")]
        # Its output before a crash counts, too.
        assert found_lines, done.stdout[-2000:] + done.stderr[-2000:]
        return "\n".join(found_lines)

    return run
