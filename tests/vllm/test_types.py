"""Checks the connector and a user's program against vLLM's and torch's own types, which lint lacks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "typing" / "with_torch.py"


def run(*command: str, folder: Path = ROOT) -> str:
    """Returns the output of Python when it runs a module or a program."""
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False)
    return f"{done.stdout}{done.stderr}" if done.returncode else "passed"


def test_the_program_runs() -> None:
    assert run(str(PROGRAM)) == "passed"


@pytest.mark.slow  # a minute or more: vLLM and torch are read
def test_all_fits_the_types_of_vllm_and_torch() -> None:
    # With a separate cache, because mypy knows other types without vLLM.
    cache = ".mypy_cache/vllm"
    checked = ("kvxfer/connectors", "tests/vllm", "tests/typing")
    assert run("-m", "mypy", "--strict", "--cache-dir", cache, *checked) == "passed"


@pytest.mark.slow
def test_the_program_passes_pyright(tmp_path: Path) -> None:
    shutil.copy(PROGRAM, tmp_path)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    said = run("-m", "basedpyright", "--pythonpath", sys.executable, PROGRAM.name, folder=tmp_path)
    assert said == "passed"
