"""The run's seed: printed, replayed by an option or the environment, and the same for every worker."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import seeds

ROOT = Path(__file__).parents[2]
TESTS = """
import json

import pytest
from hypothesis import given, settings, strategies as st
from tests import seeds

@pytest.mark.parametrize("part", ["a", "b"])
def test_draws(seed, part):
    drawn = []

    @settings(max_examples=20)
    @given(st.integers(0, 1 << 64))
    def draw(number):
        drawn.append(number)

    draw()
    helper = seeds.seed_of("helper"), seeds.next_seed("helper"), seeds.next_seed("helper")
    assert len(set(helper)) == 3
    print("drawn", json.dumps([seed, helper[1], drawn]))
    assert not drawn  # pytest shows what was printed, and how to replay it
"""


def run(tree: Path, *arguments: str, **environment: str) -> str:
    (tree / "test_made.py").write_text(TESTS)
    # Without what else is installed: schemathesis' part alone takes seconds to import.
    parts = ("tests.conftest", "xdist", "_hypothesis_pytestplugin", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", *(word for part in parts for word in ("-p", part))]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "KVXFER"))}
    done = subprocess.run(
        [*command, "-c", os.devnull, "--rootdir", str(tree), *arguments, str(tree / "test_made.py"), "-vv"],
        cwd=ROOT,
        env={**kept, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def drawn(output: str) -> list[list[Any]]:
    """Returns what each part drew: its seed, a helper's, and hypothesis' examples."""
    parts: list[list[Any]] = [json.loads(found) for found in re.findall(r"^drawn (.*)", output, re.MULTILINE)]
    assert len(parts) == 2, output
    for one, other in zip(*parts, strict=True):
        assert one != other, "two tests draw the same"
    return parts


def test_a_seed_draws_the_same_again_and_another_something_else(tmp_path: Path) -> None:
    first = run(tmp_path, CI="true")  # hypothesis behaves differently in CI
    (seed,) = re.findall(r"^seed: (\d+) ", first, re.MULTILINE)
    assert f"replay with: pytest --seed {seed}" in first
    wanted = drawn(first)
    assert drawn(run(tmp_path, "--seed", seed, KVXFER_SEED="7")) == wanted
    assert drawn(run(tmp_path, "-n", "1", KVXFER_SEED=seed)) == wanted
    another = run(tmp_path, CI="true")
    assert f"seed: {seed} " not in another
    assert drawn(another) != wanted


def test_seeds_are_the_same_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(seeds.ENVIRONMENT, "7")
    assert seeds.seed_of("a", 1) == 1983051821
