"""What a change must pass, on a machine without a GPU or an RDMA device.

``.ci/run`` runs all stages, ``.ci/run unit vllm`` these alone. Everything random takes its seed from
KVXFER_SEED, which is fresh for each run and printed. Tests that fail are run once more with the same seed:
what passes then does not stop a change, but is named as FLAKY at the end. What was printed lies in build/ci.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "ci"
#: Where kernels and what stands in for a GPU lie; which page says for which commit their tests passed.
GPU_CODE = ("native/gpu", "tests/native/emulated", "tests/native/ptx", ":!*.md")
SUPPORT = ROOT / "docs" / "support.md"
GPU_TESTS_PASSED = re.compile(r"`make native-test GPU_TESTS=ON`.*at commit `([0-9a-f]{7,40})`")

PYTEST_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)
PYTEST_CLOSING = re.compile(r"^=+ (?:.*\d+ (?:passed|failed|error).*) =+$", re.MULTILINE)
CTEST_FAILED = re.compile(r"^\s*\d+ - (\S+) \((?!Skipped)", re.MULTILINE)
CTEST_CLOSING = re.compile(r"^\d+% tests passed, .*$", re.MULTILINE)


@dataclass(frozen=True)
class Suite:
    """A make target; where its tests can be run singly, how to run what failed again."""

    target: str
    again: str = ""
    failed: re.Pattern[str] = PYTEST_FAILED
    closing: re.Pattern[str] = PYTEST_CLOSING

    @classmethod
    def of_pytest(cls, target: str) -> Suite:
        return cls(target, "ARGS=--last-failed --last-failed-no-failures=none")

    @classmethod
    def of_ctest(cls, target: str) -> Suite:
        return cls(target, "CTEST=--rerun-failed", CTEST_FAILED, CTEST_CLOSING)


@dataclass
class Outcome:
    target: str
    seconds: float = 0.0
    result: str = "passed"
    flaky: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    closing: list[str] = field(default_factory=list)


def make(target: str, log: Path, *arguments: str) -> tuple[bool, str]:
    """Runs a target, shows what it prints and keeps it; whether it passed, and what it printed."""
    command = ["make", "--no-print-directory", target, *arguments]
    print("\n==", *command, flush=True)
    lines: list[str] = []
    with (
        log.open("w") as kept,
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            kept.write(line)
            lines.append(line)
    return process.returncode == 0, "".join(lines)


def run(suite: Suite, *arguments: str) -> Outcome:
    begin = time.monotonic()
    outcome = Outcome(suite.target)
    log = LOGS / f"{suite.target}.log"
    passed, text = make(suite.target, log, *arguments)
    outcome.closing += suite.closing.findall(text)[-1:]
    failed = list(dict.fromkeys(suite.failed.findall(text)))
    if not passed and failed and suite.again:
        passed, text = make(suite.target, LOGS / f"{suite.target}-again.log", suite.again, *arguments)
        outcome.closing += suite.closing.findall(text)[-1:]
        # What ends without a word of its tests has shown nothing of them.
        still = set() if passed else set(suite.failed.findall(text)) or set(failed)
        outcome.flaky = [name for name in failed if name not in still]
        failed = [name for name in failed if name in still]
    if not passed:
        outcome.result, outcome.failed = "FAILED", failed
    elif outcome.flaky:
        outcome.result = "FLAKY"
    outcome.seconds = time.monotonic() - begin
    return outcome


def compiled() -> tuple[int, int]:
    """How many files the compiler's cache had, and had not, since its beginning."""
    if shutil.which("ccache") is None:
        return 0, 0
    printed = subprocess.run(["ccache", "--print-stats"], capture_output=True, text=True, check=False).stdout
    counts = {name: int(count) for name, count in re.findall(r"^(\w+)\t(\d+)$", printed, re.MULTILINE)}
    hits = counts.get("direct_cache_hit", 0) + counts.get("preprocessed_cache_hit", 0)
    return hits, counts.get("cache_miss", 0)


def gpu_code_changed() -> bool:
    """Since the emulated GPU's tests passed, as docs/support.md has it; yes where that cannot be told."""
    found = GPU_TESTS_PASSED.search(SUPPORT.read_text())
    if found is None:
        return True
    compare = ["git", "diff", "--quiet", found[1], "--", *GPU_CODE]
    return subprocess.run(compare, cwd=ROOT, capture_output=True).returncode != 0


def demo() -> Iterable[Outcome]:
    yield run(Suite("demo"))


def lint() -> Iterable[Outcome]:
    yield run(Suite("lint"))


def native() -> Iterable[Outcome]:
    gpu = ("GPU_TESTS=ON",) if gpu_code_changed() else ()
    yield run(Suite.of_ctest("native-test-asan"), *gpu)
    yield run(Suite.of_ctest("native-test-tsan"), *gpu)
    if gpu:
        yield run(Suite.of_ctest("native-test-plain"))


def unit() -> Iterable[Outcome]:
    yield run(Suite.of_pytest("unit"))


def nixl() -> Iterable[Outcome]:
    yield run(Suite.of_pytest("test-nixl"))


def deploy() -> Iterable[Outcome]:
    yield run(Suite.of_pytest("test-deploy"))


def docs() -> Iterable[Outcome]:
    yield run(Suite.of_pytest("docs"))


def release() -> Iterable[Outcome]:
    yield run(Suite.of_pytest("test-release"))


def rdma() -> Iterable[Outcome]:
    yield run(Suite.of_pytest("test-rdma"))


def page() -> Iterable[Outcome]:
    yield run(Suite.of_pytest("test-page"))


def vllm() -> Iterable[Outcome]:
    yield run(Suite.of_pytest("test-vllm"))


def sglang() -> Iterable[Outcome]:
    yield run(Suite.of_pytest("test-sglang"))


#: In order: the demo first, while nothing is installed but what it installs itself; lint, native and unit are
#: what `make test` is.
STAGES: tuple[Callable[[], Iterable[Outcome]], ...] = (
    *(demo, lint, native, unit),
    *(docs, page, deploy, release, nixl, rdma, vllm, sglang),
)


def main(wanted: list[str]) -> int:
    stages = {stage.__name__: stage for stage in STAGES}
    if unknown := [name for name in wanted if name not in stages]:
        print(f"no stage {', '.join(unknown)}; there are {', '.join(stages)}", file=sys.stderr)
        return 2
    seed = os.environ.setdefault("KVXFER_SEED", str(random.SystemRandom().randrange(1 << 32)))
    os.environ["CI"] = "true"  # pytest and hypothesis have other habits there: the same on every machine
    again = f"KVXFER_SEED={seed} .ci/run {' '.join(wanted)}".rstrip()
    print(f"seed {seed}; this run again: {again}", flush=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    before = compiled()
    outcomes = [outcome for name in wanted or stages for outcome in stages[name]()]
    from_cache, anew = (now - then for now, then in zip(compiled(), before, strict=True))

    print(f"\n== {again}")
    for outcome in outcomes:
        print(f"{outcome.target:20} {outcome.seconds:6.0f} s  {outcome.result}")
        for name in outcome.failed:
            print(f"  FAILED {name}")
        for name in outcome.flaky:
            print(f"  FLAKY {name} (failed and, run once more with the same seed, passed)")
    seconds = sum(outcome.seconds for outcome in outcomes)
    print(f"{'all':20} {seconds:6.0f} s  ({anew} files compiled anew, {from_cache} from a cache)")
    print(f"logs in {LOGS.relative_to(ROOT)}")
    for outcome in outcomes:
        print(*outcome.closing, sep="\n", end="\n" if outcome.closing else "")
    return int(any(outcome.result == "FAILED" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
