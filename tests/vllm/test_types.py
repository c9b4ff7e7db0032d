"""The connector is held to the engine's own types, which are not there where the rest is checked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # a minute or more: vLLM and torch are read
def test_the_connector_fits_the_types_of_vllm_and_torch() -> None:
    # In a cache of its own: without vLLM other things are known.
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", ".mypy_cache/vllm", "kvxfer/connectors", "tests/vllm"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("Success"), done.stdout + done.stderr
