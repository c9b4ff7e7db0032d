"""The tests that need a GPU, file by file in processes of their own; for `kvxfer.bench.gpu.check`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvxfer.bench.gpu import step as gpu_step
from kvxfer.bench.gpu.step import Step

# A line of `pytest -v`; of a test that has not ended nothing follows its name.
_LINE = re.compile(
    r"^(tests/\S+::.+?)(?: (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)(?: \(.*\)?)?)?(?:\s*\[ *\d+%\])?\s*$"
)
_RIGHT: Final = ("PASSED", "SKIPPED", "XFAIL")
# pytest's status where nothing was left to run.
_NOTHING: Final = 5
# What was not reached, or failed behind another's failure, is run once more, in another process.
_MOST_RUNS: Final = 3


@dataclass(frozen=True, slots=True)
class Tests:
    """What came of a file's tests.

    Attributes
    ----------
    state
        ``"passed"``, ``"failed"``, or ``"not run"``.
    num_passed, num_skipped
        Of its tests.
    wrong
        Those that failed, or had not ended when time was up, in words.
    taken_s
        All of its processes together.
    shown
        The end of what the first one that failed said.
    """

    file: str
    state: str
    num_passed: int = 0
    num_skipped: int = 0
    wrong: list[str] = field(default_factory=list)
    taken_s: float = 0.0
    shown: str = ""


def run(
    file: str,
    most_s: float,
    left_s: Callable[[], float],
    folder: Path,
) -> Tests:
    """Runs a file's tests. One that breaks its process's context, or does not end, takes no other along.

    Parameters
    ----------
    file
        Relative to the working tree.
    most_s
        Bound of each process.
    left_s
        Tells how much time there is.
    folder
        For logs.
    """
    ended: dict[str, str] = {}
    wrong: list[str] = []
    taken_s, shown = 0.0, ""
    for number in range(_MOST_RUNS):
        name = f"{Path(file).stem} {number}" if number else Path(file).stem
        outcome = gpu_step.run(
            Step(name, (*_command(file, folder / name), *_without(ended)), most_s),
            left_s(),
            folder,
            # None of which is needed, and what is installed there we do not know.
            {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        )
        if outcome is None:
            if number == 0:
                return Tests(file, "not run")
            wrong.append("the others were not run again: no time is left")
            break
        taken_s += outcome.taken_s
        if outcome.status == 0 or (outcome.status == _NOTHING and number):
            ended.update(results(outcome.output))
            break
        shown = shown or outcome.last_lines()
        found = results(outcome.output)
        failed = [test for test, result in found.items() if result not in _RIGHT]
        if not failed:
            how = "did not end in time" if outcome.status is None else f"ended with {outcome.status}"
            wrong.append(f"{file}: pytest {how}: see {outcome.log}")
            ended.update(found)
            break
        # The first is to blame; the others may have failed by what it left behind. One that has not ended
        # is the last.
        first = failed[0]
        lost = (
            f"had not ended after {outcome.taken_s:.0f} s"
            if outcome.status is None
            else f"ended its process with {outcome.status}"
        )
        wrong.append(f"{first} {found[first] or lost}: see {outcome.log}")
        ended.update({test: result for test, result in found.items() if result in _RIGHT or test == first})
        if number == _MOST_RUNS - 1:
            wrong += [f"{test} {found[test] or lost}" for test in failed[1:]]
            if not found[failed[-1]]:
                wrong.append(f"{file}: the tests behind that one were not run")
        elif len(failed) == 1 and outcome.status is not None and found[first]:
            break
    num_passed = sum(result in ("PASSED", "XFAIL") for result in ended.values())
    num_skipped = sum(result == "SKIPPED" for result in ended.values())
    return Tests(file, "failed" if wrong else "passed", num_passed, num_skipped, wrong, taken_s, shown)


def results(output: str) -> dict[str, str]:
    """Returns tests in order -> how they ended, of what ``pytest -v`` printed; "" for one that has not."""
    found: dict[str, str] = {}
    for line in output.splitlines():
        if match := _LINE.match(line):
            # Torn down with an error after it passed: the later word counts.
            found[match[1].strip()] = match[2] or ""
    return found


def _command(file: str, cache: Path) -> tuple[str, ...]:
    # pyproject.toml's options are of plugins that may be missing here.
    return (
        sys.executable,
        *("-m", "pytest", "-c", "tests/gpu/gpu-check.ini", "--rootdir", "."),
        *("-v", "-o", f"cache_dir={cache}", "-m", "gpu", file),
    )


def _without(ended: dict[str, str]) -> list[str]:
    return [f"--deselect={test}" for test in ended]
