"""The tests that need a GPU, file by file; for `kvxfer.bench.gpu.check`.

pytest-xdist runs a file in a process of its own and begins another one where a test ends it; pytest-timeout
ends one that does not end. What came of each test stands in pytest's JUnit XML.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvxfer.bench.gpu import step as gpu_step
from kvxfer.bench.gpu.step import Step

# A failure may leave its process's context broken: what failed behind it is run once more, in another one.
_MOST_RUNS: Final = 3
# None of which is needed otherwise, and what else is installed there we do not know.
_PLUGINS: Final = ("-p", "xdist.plugin", "-p", "pytest_timeout")
_PLAIN: Final = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


@dataclass(frozen=True, slots=True)
class Tests:
    """What came of a file's tests: it ``passed``, ``failed``, or was ``not run``.

    ``wrong`` has those that failed, or ended their process, in words; ``shown`` is the end of what the first
    process with a failure said.
    """

    file: str
    state: str
    num_passed: int = 0
    num_skipped: int = 0
    wrong: list[str] = field(default_factory=list)
    taken_s: float = 0.0
    shown: str = ""


def run(file: str, most_s: float, test_s: float, left_s: Callable[[], float], folder: Path) -> Tests:
    """Runs a file's tests. One that breaks its process's context, or does not end, takes no other along.

    Parameters
    ----------
    file
        Relative to the working tree.
    most_s, test_s
        Bounds of each run, and of each test.
    left_s
        Tells how much time there is.
    folder
        For logs.
    """
    ended: dict[str, str] = {}
    wrong: list[str] = []
    taken_s, shown = 0.0, ""
    for number in range(_MOST_RUNS):
        name = f"{Path(file).stem}-{number}"
        xml = (folder / f"{name}.xml").absolute()
        step = Step(name, _command(file, xml, test_s, ended), most_s)
        outcome = gpu_step.run(step, left_s(), folder, _PLAIN)
        if outcome is None:
            if number == 0:
                return Tests(file, "not run")
            wrong.append("the others were not run again: no time is left")
            break
        taken_s += outcome.taken_s
        found = results(xml)
        failed = [test for test, result in found.items() if result not in ("passed", "skipped")]
        ended |= {test: result for test, result in found.items() if test not in failed}
        if failed or not found:
            shown = shown or outcome.last_lines()
        if not failed:
            # pytest's 5 is that nothing was left to run.
            if outcome.status not in (0, 5):
                how = "did not end in time" if outcome.status is None else f"ended with {outcome.status}"
                wrong.append(f"{file}: pytest {how}: see {outcome.log}")
            break
        # The first is to blame; the others may have failed by what it left behind.
        blamed = failed if number == _MOST_RUNS - 1 else failed[:1]
        wrong += [f"{test} {found[test]}: see {outcome.log}" for test in blamed]
        ended |= {test: found[test] for test in blamed}
        if len(failed) == 1:
            break
    passed, skipped = (sum(result == kind for result in ended.values()) for kind in ("passed", "skipped"))
    return Tests(file, "failed" if wrong else "passed", passed, skipped, wrong, taken_s, shown)


def results(xml: Path) -> dict[str, str]:
    """Returns what became of each test, of pytest's XML.

    ``passed``, ``skipped``, ``failed`` or ``ended its process``, in the order of the tests.
    """
    try:
        cases = list(ElementTree.parse(xml).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return {}
    found = {}
    for case in cases:
        # Of a file that could not be loaded there is a case without a class.
        path = case.get("classname", "").replace(".", "/")
        told = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        result = "passed" if told is None else told.tag if told.tag == "skipped" else "failed"
        if told is not None and "crashed" in told.get("message", ""):
            result = "ended its process"
        found[f"{path}.py::{case.get('name')}" if path else str(case.get("name"))] = result
    return found


def _command(file: str, xml: Path, test_s: float, ended: dict[str, str]) -> tuple[str, ...]:
    # pyproject.toml's options are of plugins that may be missing here.
    return (
        *(sys.executable, "-m", "pytest", "-c", "tests/gpu/gpu-check.ini", "--rootdir", ".", *_PLUGINS),
        *("-n", "1", "--maxfail", "100", "--timeout", f"{test_s:g}", "--timeout-method", "thread"),
        # A moment before: it says where the threads stand.
        *("-o", f"faulthandler_timeout={test_s * 0.9:g}"),
        *("-o", f"cache_dir={xml.with_suffix('')}", "--junitxml", str(xml), "-m", "gpu", file),
        *(f"--deselect={test}" for test in ended),
    )
