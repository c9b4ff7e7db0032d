"""`make gpu-check` keeps its time and loses nothing, whatever a GPU does to its processes; without one."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from kvxfer.bench.gpu import check as gpu_check
from kvxfer.bench.gpu import step as gpu_step
from kvxfer.bench.gpu import tests as gpu_tests
from kvxfer.bench.gpu.check import EXIT_SAID, GpuOptions
from kvxfer.bench.gpu.step import Step

ROOT = Path(__file__).parents[4]

# As files of tests/gpu are, but for what they need.
TESTS = """
import os, time, pytest
pytestmark = pytest.mark.gpu
broken = []
def test_first(): pass
@pytest.mark.parametrize("what", ["with a blank", "b"])
def test_breaks_what_comes_behind_it(what):
    broken.append(what)
    assert what == "b", "a sticky error"
def test_behind_it(): assert "with a blank" not in broken
def test_skipped(): pytest.skip("one GPU is here")
def test_last(): {last}
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working tree with a file of tests."""
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    shutil.copy(ROOT / "tests/gpu/gpu-check.ini", tmp_path / "tests/gpu")
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
        monkeypatch.delenv(name)  # this test may run under xdist; the run that it starts is its own
    return tmp_path


def run_tests(tree: Path, last: str, test_s: float = 60.0) -> gpu_tests.Tests:
    file = "tests/gpu/test_made.py"
    (tree / file).write_text(TESTS.format(last=last))
    return gpu_tests.run(file, 120.0, test_s, lambda: 1000.0, tree / "logs")


def logs(tree: Path) -> str:
    return "".join(log.read_text() for log in (tree / "logs").glob("*.log"))


@pytest.mark.parametrize("last", ["pass", "os.abort()"])
def test_a_test_that_breaks_its_process_takes_no_other_along(tree: Path, last: str) -> None:
    found = run_tests(tree, last)
    assert found.state == "failed"
    first, *others = found.wrong
    assert "test_breaks_what_comes_behind_it[with a blank] failed" in first
    assert [words.partition(": see")[0] for words in others] == (
        [] if last == "pass" else ["tests/gpu/test_made.py::test_last ended its process"]
    )
    assert (found.num_passed, found.num_skipped) == (4 if last == "pass" else 3, 1)
    assert "a sticky error" in logs(tree)
    assert last == "pass" or "in test_last" in logs(tree)


def test_a_test_that_does_not_end_is_told_with_its_threads(tree: Path) -> None:
    found = run_tests(tree, "time.sleep(600)", test_s=5.0)
    assert any("test_last ended its process" in words for words in found.wrong)
    assert found.num_passed == 3
    assert "in test_last" in logs(tree)


def test_what_a_step_has_started_ends_with_it(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid, flush=True)\n"
        "time.sleep({})"
    )
    for pause, most_s in (("600", 3.0), ("0", 60.0)):
        step = Step("starts another", (sys.executable, "-c", code.format(pause)), most_s)
        outcome = gpu_step.run(step, 1000.0, tmp_path)
        assert outcome is not None
        assert outcome.status == (0 if pause == "0" else None)
        until = time.monotonic() + 60
        while is_alive(int(outcome.output)) and time.monotonic() < until:
            time.sleep(0.01)
        assert not is_alive(int(outcome.output))


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# Prints as kvxfer.bench.gpu.figures does: two groups break the device, and one reports an error.
FIGURES = """
import json, os, sys, time
group = json.loads(sys.argv[1])["group"]
def say(**what): print(json.dumps(what), flush=True)
say(kind="begun", name="limit")
say(kind="row", group=group, name="limit", gb_per_s=1.0, ratio=0.5, least=0.5, most=0.5, asked=0.9,
    submit_us=3.0)
say(kind="begun", name="copy")
if group == "one": os.abort()
if group == "two": time.sleep(600)
say(kind="wrong", name="copy", words="other bytes")
print('{"kind": "row", "na', end="", flush=True)
sys.exit(EXIT_SAID)
""".replace("EXIT_SAID", str(EXIT_SAID))


def a_check(folder: Path, seconds: float) -> gpu_check.Check:
    from kvxfer.gpu.availability import Availability

    options = GpuOptions(logs=str(folder / "logs"), out=str(folder / "out.json"))
    until = time.monotonic() + seconds
    return gpu_check.Check(options, until, gpu_check._nothing_yet(Availability(), options))


def test_a_copy_that_breaks_the_device_takes_no_other_group_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "_FIGURES_COMMAND", (sys.executable, "-c", FIGURES))
    monkeypatch.setattr(gpu_check, "GROUPS", ("one", "two", "three"))
    monkeypatch.setattr(gpu_check, "_FIGURE_S", 5.0)
    check = a_check(tmp_path, 1000.0)
    gpu_check.figures(check)
    assert [row["group"] for row in check.result["row"]] == ["one", "two", "three"]
    wrong = [row["words"] for row in check.result["wrong"]]
    assert len(wrong) == 3
    assert wrong[0].startswith("figures, one: ended with -6")
    assert "at 'copy'" in wrong[0]
    assert wrong[1].startswith("figures, two: had not ended")
    assert wrong[2] == "three, copy: other bytes"
    assert json.loads((tmp_path / "out.json").read_text()) == check.result


def test_every_file_of_tests_that_need_a_gpu_is_run() -> None:
    files = {
        path.stem.removeprefix("test_")
        for path in (ROOT / "tests/gpu").glob("test_*.py")
        if "mark.gpu" in path.read_text()
    }
    assert files == set(gpu_check._TESTS)
