"""Which stages a change must pass, and how far: tables and no more, which tests/unit/test_stages.py holds.

A stage whose area has not changed since the last commit on which all stages passed runs its smoke tests
alone. That commit, and the one of the emulated GPU, stand in docs/support.md. What no row of AREAS names is
everybody's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUPPORT = ROOT / "docs" / "support.md"

PYTEST_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)
PYTEST_CLOSING = re.compile(r"^=+ (?:.*\d+ (?:passed|failed|error).*) =+$", re.MULTILINE)
CTEST_FAILED = re.compile(r"^\s*\d+ - (\S+) \((?!Skipped)", re.MULTILINE)
CTEST_CLOSING = re.compile(r"^\d+% tests passed, .*$", re.MULTILINE)


@dataclass(frozen=True)
class Suite:
    """A make target with its arguments; where its tests can be run singly, how to run what failed again."""

    target: str
    arguments: tuple[str, ...] = ()
    again: str = ""
    failed: re.Pattern[str] = PYTEST_FAILED
    closing: re.Pattern[str] = PYTEST_CLOSING


def of_pytest(target: str, *arguments: str) -> Suite:
    return Suite(target, arguments, "ARGS=--last-failed --last-failed-no-failures=none")


def of_ctest(target: str, *arguments: str) -> Suite:
    return Suite(target, arguments, "CTEST=--rerun-failed", CTEST_FAILED, CTEST_CLOSING)


def smoke_of(target: str, of: str = "smoke") -> tuple[Suite, ...]:
    """The tests that are marked smoke; pytest takes the last -m of several."""
    return (of_pytest(target, f"ARGS=-m '{of}'"),)


@dataclass(frozen=True)
class Stage:
    name: str
    suites: tuple[Suite, ...] = ()
    #: By day, where nothing of its area has changed; empty: it always runs whole.
    smoke: tuple[Suite, ...] = ()
    #: At night in place of `suites`, where these are fewer.
    night: tuple[Suite, ...] = ()
    #: By day, on a slow or busy machine: what would begin later than this is cut short, and the run says so.
    late_s: int = 45 * 60
    #: Neighbours of unlike lanes run at the same time: their tests wait more than they compute. Two stages
    #: with engines would need more than 24 GB.
    lane: str = ""


GPU = "GPU_TESTS=ON"

#: In order: the demo first, while nothing is installed but what it installs itself; lint, unit and native are
#: what `make test` is. Those without suites of the day run at night alone.
STAGES = (
    Stage("demo", (Suite("demo"),)),
    Stage("lint", (Suite("lint"),)),
    Stage("unit", (of_pytest("unit"),)),
    Stage(
        "native",
        (of_ctest("native-test-asan"), of_ctest("native-test-tsan")),
        smoke=(
            of_ctest("native-test-asan", "CTEST=-R '^test_(conformance|drivers|runtime|session|wire)$$'"),
        ),
        night=tuple(of_ctest(f"native-test-{build}", GPU) for build in ("asan", "tsan", "plain", "clang")),
        late_s=30 * 60,
    ),
    Stage("docs", (of_pytest("docs"),), smoke_of("docs"), lane="daemons"),
    Stage("page", (of_pytest("test-page"),), smoke_of("test-page", "smoke and browser"), lane="daemons"),
    Stage("deploy", (of_pytest("test-deploy"),), smoke_of("test-deploy"), lane="daemons"),
    Stage("release", (of_pytest("test-release"),), smoke_of("test-release"), lane="daemons"),
    Stage("nixl", (of_pytest("test-nixl"),), smoke_of("test-nixl"), lane="daemons"),
    Stage(
        "rdma",
        (of_pytest("test-rdma"),),
        smoke_of("test-rdma", "smoke and rdma"),
        night=(of_pytest("test-rdma", "RDMA_TESTS=slow or not slow"),),
        lane="daemons",
    ),
    Stage(
        "vllm",
        (of_pytest("test-vllm"),),
        smoke_of("test-vllm"),
        night=(of_pytest("test-vllm", "VLLM_TESTS=slow or not slow"),),
        lane="engines",
    ),
    Stage(
        "sglang",
        (of_pytest("test-sglang"),),
        smoke_of("test-sglang"),
        night=(of_pytest("test-sglang", "SGLANG_TESTS=slow or not slow"),),
        lane="engines",
    ),
    Stage("slow", night=(of_pytest("test-slow"),)),
    Stage("layouts", night=(of_pytest("test-layouts"),)),
    Stage("asan", night=(of_pytest("unit-asan"),)),
    Stage("pythons", night=(Suite("unit-pythons"),)),
    Stage("torch", night=(of_pytest("test-torch"),)),
    Stage("vllm-next", night=(of_pytest("test-vllm-next"),)),
    Stage("fuzz", night=(Suite("fuzz", ("FUZZ_RUNS=20000000",)),)),
)

EVERYBODY = frozenset(stage.name for stage in STAGES if stage.suites)

#: The first row whose paths a file lies under says whose area it is, beside the stages that always run whole.
AREAS: tuple[tuple[str, str], ...] = (
    ("docs/ mkdocs.yml tests/docs/", "docs"),
    ("CHANGELOG.md README.md", "docs release"),
    ("CONTRIBUTING.md connectors/README.md native/DESIGN.md native/SPEED.md kvxfer/LAYOUTS.md", "docs"),
    ("deploy/ tests/deploy/ .dockerignore", "deploy docs"),
    ("tests/release/", "release"),
    ("connectors/vllm/ tests/vllm/", "vllm sglang release"),
    ("connectors/sglang/ tests/sglang/ tests/between/", "sglang release"),
    ("connectors/trtllm/", "release"),
    ("connectors/nixl/", "nixl vllm deploy page release"),
    ("native/nixl_plugin/ tests/nixl/", "nixl native release"),
    ("connectors/common/ connectors/__init__.py", "vllm sglang nixl deploy page release"),
    ("tests/connectors/ tests/unit/", "vllm sglang page release"),
    ("tests/control/", "page deploy sglang release"),
    ("tests/fault/ tests/bench/", "rdma page"),
    ("tests/rdma/ .ci/rdma-packages", "rdma"),
    (".ci/browser-packages", "page"),
    ("kvxfer/control/ kvxfer/doctor/", "page deploy sglang docs release"),
    ("kvxfer/cli/", "page deploy docs release"),
    ("bench/", "page deploy nixl rdma vllm sglang docs"),
    ("native/transports/verbs/ native/transports/ucx/ native/transports/libfabric/", "native rdma release"),
    ("native/gpu/", "native release"),
    ("tests/native/", "native"),
    (
        "tests/trtllm/ tests/property/ tests/conformance/ tests/examples/ tests/gpu/ tests/typing/ examples/",
        "docs",
    ),
    (".github/ .editorconfig .gitignore .clang-format LICENSE", "release"),
)

#: Where kernels and what stands in for a GPU lie.
GPU_AREA = ("native/gpu/", "tests/native/emulated/", "tests/native/ptx/")


def area_of(path: str) -> frozenset[str]:
    """The stages, by name, whose outcome a file can change."""
    for paths, stages in AREAS:
        if any(
            path == prefix or (prefix.endswith("/") and path.startswith(prefix)) for prefix in paths.split()
        ):
            return frozenset(stages.split())
    return EVERYBODY


def areas_of(paths: Iterable[str]) -> frozenset[str]:
    return frozenset().union(*map(area_of, paths))


def by_day(changed: Iterable[str] | None, gpu_changed: bool) -> dict[str, tuple[Suite, ...]]:
    """What each stage runs, given the files that changed since all passed; None where that is not known."""
    areas = EVERYBODY if changed is None else areas_of(changed)
    suites = {
        stage.name: stage.suites if stage.name in areas or not stage.smoke else stage.smoke
        for stage in STAGES
        if stage.suites
    }
    if gpu_changed:
        suites["native"] = tuple(of_ctest(f"native-test-{build}", GPU) for build in ("asan", "tsan", "plain"))
    return suites


def late(name: str, elapsed_s: float) -> tuple[Suite, ...]:
    """What is left of a stage by day after so long: its smoke tests; empty where it is to go on whole."""
    stage = next(stage for stage in STAGES if stage.name == name)
    return stage.smoke if elapsed_s > stage.late_s else ()


def by_night() -> dict[str, tuple[Suite, ...]]:
    return {stage.name: stage.night or stage.suites for stage in STAGES}


def lanes(names: Iterable[str]) -> list[list[list[str]]]:
    """The stages in order: the lanes of a list run at the same time, the stages of a lane in turn."""
    by_name = {stage.name: stage for stage in STAGES}
    groups = groupby(names, key=lambda name: bool(by_name[name].lane) or name)
    ordered = []
    for _, group in groups:
        beside: dict[str, list[str]] = {}
        for name in group:
            beside.setdefault(by_name[name].lane, []).append(name)
        ordered.append(list(beside.values()))
    return ordered


def passed_at(what: str) -> str:
    """The commit that docs/support.md names in the row of this part; empty if it names none."""
    row = re.search(rf"^\| {re.escape(what)}.*\| `([0-9a-f]{{7,40}})` \|$", SUPPORT.read_text(), re.MULTILINE)
    return row[1] if row else ""


#: The rows' first words.
ALL_STAGES = "all stages: `.ci/run --whole`"
EMULATED_GPU = "the emulated GPU and PTX: `make native-test-plain GPU_TESTS=ON`"
