"""The tests that need a GPU, file by file; for `kvxfer.bench.gpu.check`.

As a plugin of pytest-xdist's processes this module ends each at its first test that fails, since that may
leave the context broken for all behind it; another process runs those.
"""

from __future__ import annotations

import os
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvxfer.bench.gpu import step as gpu_step
from kvxfer.bench.gpu.step import Step

# tests/conftest.py, which has the run's seed, stands above the settings.
_ROOT: Final = ("--rootdir", ".", "--confcutdir", ".")
# None of which is needed otherwise, and what else is installed there we do not know.
_PLUGINS: Final = ("-p", "xdist.plugin", "-p", "pytest_timeout", "-p", "kvxfer.bench.gpu.tests")
_PLAIN: Final = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
# Failures, and with them processes, of a file; what fails more often is broken altogether.
_MOST_FAILURES: Final = "100"

_failed: set[str] = set()


@dataclass(frozen=True, slots=True)
class Tests:
    """What came of a file's tests: it ``passed``, ``failed``, or was ``not run``; ``wrong`` is in words."""

    file: str
    state: str
    num_passed: int = 0
    num_skipped: int = 0
    wrong: list[str] = field(default_factory=list)
    taken_s: float = 0.0
    shown: str = ""


def run(file: str, most_s: float, test_s: float, left_s: Callable[[], float], folder: Path) -> Tests:
    """Runs a file's tests. One that breaks its process's context, or does not end, takes no other along."""
    name = Path(file).stem
    xml = (folder / f"{name}.xml").absolute()
    outcome = gpu_step.run(Step(name, _command(file, xml, test_s), most_s), left_s(), folder, _PLAIN)
    if outcome is None:
        return Tests(file, "not run")
    found = results(xml)
    good = ("passed", "skipped")
    wrong = [f"{test} {said}: see {outcome.log}" for test, said in found.items() if said not in good]
    # pytest's 5 is that there was nothing to run.
    if not wrong and outcome.status not in (0, 5):
        how = "did not end in time" if outcome.status is None else f"ended with {outcome.status}"
        wrong.append(f"{file}: pytest {how}: see {outcome.log}")
    passed, skipped = (sum(said == kind for said in found.values()) for kind in good)
    state, shown = ("failed", outcome.last_lines()) if wrong else ("passed", "")
    return Tests(file, state, passed, skipped, wrong, outcome.taken_s, shown)


def pytest_runtest_logreport(report: Any) -> None:
    """Notes what fails."""
    if report.failed:
        _failed.add(report.nodeid)


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Ends a process of pytest-xdist at its first failure, whose reports are with the first process then."""
    if nodeid in _failed and "PYTEST_XDIST_WORKER" in os.environ:
        os._exit(1)


def results(xml: Path) -> dict[str, str]:
    """Returns what became of each test, of pytest's XML.

    ``passed``, ``skipped``, ``failed`` or ``ended its process``: what a test was first said to have done.
    """
    try:
        cases = list(ElementTree.parse(xml).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return {}
    found: dict[str, str] = {}
    for case in cases:
        # Of a file that could not be loaded there is a case without a class.
        path = case.get("classname", "").replace(".", "/")
        told = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        result = "passed" if told is None else told.tag if told.tag == "skipped" else "failed"
        if told is not None and "crashed" in told.get("message", ""):
            result = "ended its process"
        found.setdefault(f"{path}.py::{case.get('name')}" if path else str(case.get("name")), result)
    return found


def _command(file: str, xml: Path, test_s: float) -> tuple[str, ...]:
    # pyproject.toml's options are of plugins that may be missing here.
    return (
        *(sys.executable, "-m", "pytest", "-c", "tests/gpu/gpu-check.ini", *_ROOT, *_PLUGINS),
        *(
            "-n",
            "1",
            "--max-worker-restart",
            _MOST_FAILURES,
            "--timeout",
            f"{test_s:g}",
            "--timeout-method",
            "thread",
        ),
        # A moment before: it says where the threads stand.
        *("-o", f"faulthandler_timeout={test_s * 0.9:g}"),
        *("-o", f"cache_dir={xml.with_suffix('')}", "--junitxml", str(xml), "-m", "gpu", file),
    )
