import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from packaging.requirements import Requirement

from kvxfer import cli

# Finds nothing of the modules named in its environment: they are as if they were not installed.
_AS_IF_ABSENT = """
import os, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in absent or name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

absent = set(os.environ["ABSENT"].split(","))
sys.meta_path.insert(0, Absent())
from kvxfer import cli
sys.exit(cli.main(sys.argv[1:]))
"""


def _installed_with(distribution: str, extras: set[str], found: set[str]) -> set[str]:
    """The distributions that come along with one, by the names that packages_distributions() has."""
    name = importlib.metadata.metadata(distribution)["Name"]
    if name in found:
        return found
    found.add(name)
    for line in importlib.metadata.requires(distribution) or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            _installed_with(requirement.name, requirement.extras, found)
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("doctor", "--json"),
        ("bench", "serving", "--help"),
        ("bench", "handover", "--requests", "1", "--transport", "shm"),
    ],
    ids=lambda arguments: "-".join(arguments[:2]).replace("--", ""),
)
def test_commands_run_with_what_their_extra_installs(arguments: tuple[str, ...]) -> None:
    """Tests have all extras; a user of `pip install 'kvxfer[cli]'` or `make demo` has only this one."""
    pytest.importorskip("typer")
    present = _installed_with("kvxfer", {"", "cli"}, set())
    absent = {
        module
        for module, distributions in importlib.metadata.packages_distributions().items()
        if not present.intersection(distributions)
    }
    assert {"pytest", "fastapi"} <= absent
    ran = subprocess.run(
        [sys.executable, "-c", _AS_IF_ABSENT, *arguments],
        env={**os.environ, "ABSENT": ",".join(absent)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr


def _without_native_modules(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _AS_IF_ABSENT, *arguments],
        env={**os.environ, "ABSENT": "kvxfer._native,kvxfer.bench._limits"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_doctor_runs_where_the_native_module_does_not_load() -> None:
    pytest.importorskip("typer")
    ran = _without_native_modules("doctor", "--json")
    assert ran.returncode == 1, ran.stderr
    findings = {finding["name"]: finding for finding in json.loads(ran.stdout)["findings"]}
    assert findings["kvxfer"]["state"] == "blocks"
    assert "No module named 'kvxfer._native'" in findings["kvxfer"]["found"]


def test_a_benchmark_without_native_modules_is_one_line_and_status_2() -> None:
    pytest.importorskip("typer")
    ran = _without_native_modules("bench", "pages", "--transport", "shm")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "kvxfer doctor says what to do" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_missing_extra_says_which_command_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec

    def without_typer(name: str, *rest: Any) -> Any:
        return None if name == "typer" else find_spec(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without_typer)
    assert cli.main(["bench", "pages"]) == 2
    assert "needs typer: pip install 'kvxfer[cli]'" in capsys.readouterr().err


def test_unknown_option_is_status_2_and_help_hides_what_tests_need(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("typer")
    assert cli.main(["bench", "pages", "--speed", "9"]) == 2
    assert cli.main(["bench", "handover", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--prefill-ms-per-layer" in shown
    assert "--corrupt" not in shown
