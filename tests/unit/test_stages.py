"""Which stages a change runs whole, held to what the tests import; and how a run ends."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]

#: Of each stage that may run its smoke tests alone: what it runs whole.
TESTS = {
    "docs": ["tests/docs/"],
    "page": ["tests/control/test_page.py", "tests/bench/test_report_page.py"],
    "deploy": ["tests/deploy/"],
    "release": ["tests/release/"],
    "nixl": ["tests/nixl/"],
    "rdma": ["tests/rdma/"],
    "vllm": ["tests/vllm/"],
    "sglang": ["tests/sglang/", "tests/between/"],
}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stages = load("stages")


@cache
def files() -> tuple[str, ...]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple(name for name in listed.splitlines() if (ROOT / name).is_file())


@cache
def modules() -> dict[str, str]:
    """The file of each name that can be imported; bench and connectors are in the package by links."""
    found = {}
    for name in files():
        if name.endswith(".py"):
            dotted = name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
            found[dotted] = name
            if dotted.split(".")[0] in ("bench", "connectors"):
                found[f"kvxfer.{dotted}"] = name
    return found


@cache
def imports(name: str) -> frozenset[str]:
    package = name.removesuffix("/__init__.py").removesuffix(".py").split("/")
    if not name.endswith("/__init__.py"):
        package.pop()
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return frozenset(modules()[dotted] for dotted in names if dotted in modules())


def all_imports(beginnings: list[str]) -> set[str]:
    seen = {name for name in modules().values() if name.startswith(tuple(beginnings))}
    todo = list(seen)
    while todo:
        new = imports(todo.pop()) - seen
        seen |= new
        todo += new
    return seen


def whole(*changed: str) -> set[str]:
    chosen = stages.by_day(changed, gpu_changed=False)
    return {stage.name for stage in stages.STAGES if stage.smoke and chosen[stage.name] == stage.suites}


def test_stages_that_have_smoke_tests_are_listed_here_and_one_test_of_each_is_marked() -> None:
    assert set(TESTS) == {stage.name for stage in stages.STAGES if stage.smoke} - {"native"}
    for beginnings in TESTS.values():
        texts = [(ROOT / name).read_text() for name in files() if name.startswith(tuple(beginnings))]
        assert any("@pytest.mark.smoke" in text for text in texts), beginnings


@pytest.mark.parametrize(
    ("changed", "stages_whole"),
    [
        ("README.md", "docs release"),
        ("docs/verbs.md", "docs"),
        ("connectors/trtllm/worker.py", "release"),
        ("connectors/vllm/connector.py", "vllm sglang release"),
        ("kvxfer/control/app.py", "page deploy sglang docs release"),
        ("native/transports/verbs/rail.cpp", "native rdma release"),
        ("tests/native/test_wire.cpp", "native"),
        ("tests/rdma/test_verbs.py", "rdma"),
    ],
)
def test_a_file_s_area_runs_whole(changed: str, stages_whole: str) -> None:
    assert whole(changed) == set(stages_whole.split())
    assert whole(changed, "README.md") == set(stages_whole.split()) | {"docs", "release"}


@pytest.mark.parametrize(
    "changed",
    [
        "native/core/engine/engine.cpp",
        "kvxfer/session/dials.py",
        "kvxfer/plan/units.py",
        "kvxfer/layout/slices.py",
        "Makefile",
        "a/new/folder",
    ],
)
def test_the_core_and_what_nobody_has_named_run_everything(changed: str) -> None:
    assert whole(changed) == {*TESTS, "native"}


def test_without_a_change_smoke_runs_and_without_knowing_everything() -> None:
    assert stages.passed_at(stages.EMULATED_GPU)
    assert whole() == set()
    chosen = stages.by_day(None, gpu_changed=False)
    assert all(chosen[stage.name] == stage.suites for stage in stages.STAGES if stage.suites)
    assert "native-test-plain" in {suite.target for suite in stages.by_day([], gpu_changed=True)["native"]}


def test_each_row_names_files_and_stages_that_there_are() -> None:
    for paths, names in stages.AREAS:
        for path in paths.split():
            assert any(name.startswith(path) for name in files()), path
        assert set(names.split()) <= {*TESTS, "native"}, paths


@pytest.mark.parametrize("stage", TESTS)
def test_what_a_stage_s_tests_import_is_its_area(stage: str) -> None:
    missed = {name for name in all_imports(TESTS[stage]) if stage not in stages.area_of(name)}
    assert not missed, f"a change of these would not run {stage}"


def test_neighbours_of_unlike_lanes_run_at_once_and_engines_in_turn() -> None:
    assert stages.lanes(["unit", "docs", "rdma", "vllm", "sglang", "slow"]) == [
        [["unit"]],
        [["docs", "rdma"], ["vllm", "sglang"]],
        [["slow"]],
    ]


# -- Runs, of a project with three suites ---------------------------------------------------------------

MAKEFILE = """
unit test-torch test-nixl:
	@n=$$(($$(cat $@.n 2>/dev/null || echo 0) + 1)); echo $$n >$@.n; \\
	case "$$(sed -n $${n}p $@.runs)" in \\
	pass) echo "== 1 passed in 0.1s ==";; \\
	*) echo "FAILED tests/test_a.py::test_b - no"; echo "== 1 failed in 0.1s =="; exit 1;; esac
"""


def project(folder: Path, **runs: str) -> Path:
    """How each target's runs end, in turn; whoever runs beyond them fails."""
    (folder / "docs").mkdir()
    (folder / ".ci").mkdir()
    for name in (".ci/run", ".ci/check.py", ".ci/stages.py", "docs/support.md"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "Makefile").write_text(MAKEFILE)
    (folder / ".gitignore").write_text("*.n\nbuild\n__pycache__\n")
    for target, ends in runs.items():
        (folder / f"{target.replace('_', '-')}.runs").write_text("\n".join(ends.split()) + "\n")
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm a"):
        subprocess.run(["git", *command.split()], cwd=folder, check=True)
    return folder


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run([".ci/run", *arguments], cwd=folder, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("runs", "status", "words"),
    [
        ("pass", 0, "1 passed"),
        ("fail pass", 1, "FLAKY tests/test_a.py::test_b"),
        ("fail fail", 1, "FAILED tests/test_a.py::test_b"),
    ],
)
def test_a_failure_fails_the_run_also_if_it_passes_when_repeated(
    tmp_path: Path, runs: str, status: int, words: str
) -> None:
    returned, text = run(project(tmp_path, unit=runs), "unit")
    assert returned == status, text
    assert words in text.rpartition("this run again")[2]


def test_what_begins_late_runs_its_smoke_tests_alone_and_the_run_says_so(tmp_path: Path) -> None:
    folder = project(tmp_path, unit="pass pass", test_nixl="pass pass")
    table = folder / ".ci" / "stages.py"
    table.write_text(re.sub(r"late_s: int = .*", "late_s: int = -1", table.read_text()))
    status, text = run(folder, "unit", "nixl")
    assert status == 0, text
    assert "== make --no-print-directory test-nixl ARGS=-m 'smoke'" in text
    assert text.count("(--whole runs all): nixl") == 1
    status, text = run(folder, "--whole", "unit", "nixl")
    assert status == 0, text
    assert "smoke" not in text


def test_a_night_goes_on_where_it_was_cut_off_and_not_over_another_commit(tmp_path: Path) -> None:
    folder = project(tmp_path, unit="pass", test_torch="fail fail pass")
    status, text = run(folder, "--night", "unit", "torch")
    assert status == 1, text
    status, text = run(folder, "--night", "unit", "torch")
    assert status == 0, "what passed has run again, or what failed has not"
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True).stdout
    assert f"commit {head[:10]}" in text
    (folder / "new").touch()
    assert run(folder, "--night", "unit")[0] == 1, "a changed tree is another one"
