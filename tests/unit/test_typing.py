"""A user's program is checked against the package's types, its public names included, by two checkers."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvxfer

# A program that a user would write; it runs as well.
PROGRAM = Path(__file__).parents[1] / "typing" / "program.py"
MISTAKES = """
import kvxfer

kvxfer.Agnet
kvxfer.gpu.share_memory
kvxfer.AgentOptions(shm_peers="all")
kvxfer.Agent("prefill").stats()["transfers"]
kvxfer.Group([kvxfer.Agent("prefill")])
kvxfer.Group([]).wiat()
"""

# Returns a checker's findings about a program: for each line, the rule that it breaks.
Found = list[tuple[int, str]]


def mypy(program: Path) -> Found:
    """Checks in strict mode."""
    pytest.importorskip("mypy", reason="the extra dev is not installed")
    said = run(program, "mypy", "--strict", program.name)
    assert re.search(r"^(Success|Found \d+ error)", said, re.MULTILINE), said
    return [(int(line), rule) for line, rule in re.findall(r"\.py:(\d+): error: .*\[([\w-]+)\]", said)]


def pyright(program: Path) -> Found:
    """Checks in strict mode, by the build of pyright that brings what it runs on."""
    pytest.importorskip("basedpyright", reason="the extra dev is not installed")
    (program.parent / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    said = run(program, "basedpyright", "--pythonpath", sys.executable, "--outputjson", program.name)
    return [
        (each["range"]["start"]["line"] + 1, each["rule"])
        for each in json.loads(said)["generalDiagnostics"]
        if each["severity"] == "error"
    ]


def run(program: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=program.parent, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


@pytest.fixture(params=[mypy, pyright])
def check(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Found]:
    """Checks the text of a program, from outside of this repository."""

    def checked(text: str) -> Found:
        (tmp_path / "program.py").write_text(text)
        found: Found = request.param(tmp_path / "program.py")
        return found

    return checked


def test_the_program_runs() -> None:
    pytest.importorskip("kvxfer._native", reason="the native module is not built")
    done = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow  # they read numpy first
def test_the_program_passes_in_strict_mode(check: Callable[[str], Found]) -> None:
    assert check(PROGRAM.read_text()) == []


@pytest.mark.slow
def test_every_public_name_is_there(check: Callable[[str], Found]) -> None:
    names = [f"kvxfer.{name}" for name in (*kvxfer.__all__, "__version__")]
    for module in kvxfer._MODULES:
        public = getattr(importlib.import_module(f"kvxfer.{kvxfer._MODULES[module]}"), "__all__", [])
        names += [f"kvxfer.{module}.{name}" for name in public]
    lines = [f"name_{at}: object = {name}" for at, name in enumerate(names)]
    assert check("\n".join(["import kvxfer", *lines, ""])) == []


@pytest.mark.slow
def test_mistakes_in_names_modes_counters_and_members_are_found(check: Callable[[str], Found]) -> None:
    assert sorted({line for line, _ in check(MISTAKES)}) == [4, 5, 6, 7, 8, 9]
