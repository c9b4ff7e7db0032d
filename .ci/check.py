"""Runs the stages of stages.py: .ci/run by day, .ci/run --night as `make nightly`.

``.ci/run`` runs all stages, ``.ci/run unit vllm`` these alone. Everything random takes its seed from
KVXFER_SEED, which is fresh for each run and printed. Tests that fail are run once more with the same seed:
what passes then is named as FLAKY, and fails the run as well. What was printed lies in build/ci.
By day what would begin later than its Stage.late_s is cut short to smoke tests, unless --whole is given.
A night's stages that passed are not run again at the same commit, so that a night that was cut off goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

import stages
from stages import ROOT, Suite

LOGS = ROOT / "build" / "ci"
NIGHT = LOGS / "night.json"


@dataclass
class Outcome:
    target: str
    seconds: float = 0.0
    #: Of processors, by all that it started and waited for.
    processor_seconds: float = 0.0
    result: str = "passed"
    flaky: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    closing: list[str] = field(default_factory=list)


def make(suite: Suite, outcome: Outcome, log: str, *more: str) -> tuple[bool, str]:
    """Runs a target, shows what it prints and keeps it; whether it passed, and what it printed."""
    command = ["make", "--no-print-directory", suite.target, *suite.arguments, *more]
    print("\n==", *command, flush=True)
    begin = time.monotonic()
    lines: list[str] = []
    with (
        (LOGS / f"{log}.log").open("w") as kept,
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
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    outcome.seconds += time.monotonic() - begin
    outcome.processor_seconds += used.ru_utime + used.ru_stime
    return process.returncode == 0, "".join(lines)


def run(suite: Suite) -> Outcome:
    outcome = Outcome(suite.target)
    passed, text = make(suite, outcome, suite.target)
    outcome.closing += suite.closing.findall(text)[-1:]
    failed = list(dict.fromkeys(suite.failed.findall(text)))
    if not passed:
        outcome.result = "FAILED"
    if not passed and failed and suite.again:
        # The later of two equal variables counts: what failed is run again, smoke test or not.
        passed, text = make(suite, outcome, f"{suite.target}-again", suite.again)
        outcome.closing += suite.closing.findall(text)[-1:]
        # What ends without a word of its tests has shown nothing of them.
        still = set() if passed else set(suite.failed.findall(text)) or set(failed)
        outcome.flaky = [name for name in failed if name not in still]
        failed = [name for name in failed if name in still]
        if passed:
            outcome.result = "FLAKY"
    outcome.failed = failed
    return outcome


def git(*arguments: str) -> str | None:
    """What git prints; None where it fails, as for a commit that this clone does not have."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def changed_since(commit: str, *paths: str) -> list[str] | None:
    """The files that differ from a commit's, and those that are new; None where that is not known."""
    differ = git("diff", "--name-only", "--no-renames", commit, "--", *paths) if commit else None
    new = git("ls-files", "--others", "--exclude-standard", "--", *paths)
    return None if differ is None or new is None else (differ + new).split("\n")[:-1]


def by_day(whole: bool) -> dict[str, tuple[Suite, ...]]:
    gpu_files = changed_since(stages.passed_at(stages.EMULATED_GPU), *stages.GPU_AREA, ":!*.md")
    commit = stages.passed_at(stages.ALL_STAGES)
    changed = None if whole else changed_since(commit)
    suites = stages.by_day(changed, gpu_changed=gpu_files is None or bool(gpu_files))
    if changed is None:
        print("every stage runs whole")
    else:
        short = [stage.name for stage in stages.STAGES if stage.smoke and suites[stage.name] == stage.smoke]
        print(
            f"{len(changed)} files changed since {commit}, on which all passed; smoke tests alone of:", *short
        )
    return suites


def compiled() -> tuple[int, int]:
    """How many files the compiler's cache had, and had not, since its beginning."""
    if shutil.which("ccache") is None:
        return 0, 0
    printed = subprocess.run(["ccache", "--print-stats"], capture_output=True, text=True, check=False).stdout
    counts = {name: int(count) for name, count in re.findall(r"^(\w+)\t(\d+)$", printed, re.MULTILINE)}
    hits = counts.get("direct_cache_hit", 0) + counts.get("preprocessed_cache_hit", 0)
    return hits, counts.get("cache_miss", 0)


def passed_this_night(commit: str) -> dict[str, list[Outcome]]:
    """Of a night that was cut off, at this very commit."""
    try:
        night = json.loads(NIGHT.read_text())
    except (OSError, ValueError):
        return {}
    if night["commit"] != commit:
        return {}
    return {name: [Outcome(**outcome) for outcome in kept] for name, kept in night["stages"].items()}


def keep_night(commit: str, kept: dict[str, list[Outcome]]) -> None:
    night = {name: [asdict(outcome) for outcome in passed] for name, passed in kept.items()}
    beside = NIGHT.with_suffix(".new")
    beside.write_text(json.dumps({"commit": commit, "stages": night}, indent=1))
    beside.replace(NIGHT)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=".ci/run", description=__doc__, allow_abbrev=False)
    parser.add_argument("stages", nargs="*", help="these alone")
    parser.add_argument("--whole", action="store_true", help="also what has not changed, however late")
    parser.add_argument(
        "--night", action="store_true", help="what runs at night, with what was left out by day"
    )
    parser.add_argument("--anew", action="store_true", help="at night: also what has passed at this commit")
    options = parser.parse_args(arguments)
    suites = stages.by_night() if options.night else by_day(options.whole)
    if unknown := [name for name in options.stages if name not in suites]:
        print(f"no stage {', '.join(unknown)}; there are {', '.join(suites)}", file=sys.stderr)
        return 2
    seed = os.environ.setdefault("KVXFER_SEED", str(random.SystemRandom().randrange(1 << 32)))
    os.environ["CI"] = "true"  # pytest and hypothesis have other habits there: the same on every machine
    again = f"KVXFER_SEED={seed} .ci/run {' '.join(arguments)}".rstrip()
    print(f"seed {seed}; this run again: {again}", flush=True)
    LOGS.mkdir(parents=True, exist_ok=True)

    commit = (git("rev-parse", "--short=10", "HEAD") or "unknown").strip()
    if git("status", "--porcelain") != "":
        commit += " with changes"
    kept = passed_this_night(commit) if options.night and not options.anew and " " not in commit else {}
    before = compiled()
    outcomes: dict[str, list[Outcome]] = {}
    cut_short: list[str] = []

    stop = threading.Event()
    writing = threading.Lock()

    def run_lane(names: list[str]) -> None:
        for name in names:
            if stop.is_set():
                return
            if name in kept:
                print(
                    f"\n== {name} has passed at {commit} already: not run again (--anew runs it)", flush=True
                )
                outcomes[name] = kept[name]
                continue
            ended = outcomes[name] = []
            for suite in suites[name]:
                smoke = () if options.night or options.whole else stages.late(name, time.monotonic() - begin)
                if smoke and suites[name] != smoke:
                    cut_short.append(name)
                    ended += map(run, () if ended else smoke)
                    break
                ended.append(run(suite))
            if options.night and all(outcome.result == "passed" for outcome in outcomes[name]):
                with writing:
                    kept[name] = outcomes[name]
                    keep_night(commit, kept)

    begin = time.monotonic()
    names = options.stages or list(suites)
    for beside in stages.lanes(names):
        with ThreadPoolExecutor(len(beside)) as threads:
            running = [threads.submit(run_lane, lane) for lane in beside]
            try:
                for lane in running:
                    lane.result()
            except BaseException:
                # Ctrl-C has reached what they run, too; nothing more is begun.
                stop.set()
                raise
    from_cache, anew = (now - then for now, then in zip(compiled(), before, strict=True))

    done = [outcome for name in names for outcome in outcomes[name]]
    print(
        f"\n== {again}\n== commit {commit}, {time.strftime('%Y-%m-%d %H:%M')}; time, and time of processors"
    )
    for outcome in done:
        times = f"{outcome.seconds:6.0f} s {outcome.processor_seconds:6.0f} s"
        print(f"{outcome.target:20} {times}  {outcome.result}")
        for name in outcome.failed:
            print(f"  FAILED {name}")
        for name in outcome.flaky:
            print(
                f"  FLAKY {name} (failed and, run once more with the same seed, passed: a fault all the same)"
            )
    seconds = time.monotonic() - begin
    used = sum(outcome.processor_seconds for outcome in done)
    print(
        f"{'all':20} {seconds:6.0f} s {used:6.0f} s  ({anew} files compiled anew, {from_cache} from a cache)"
    )
    if cut_short:
        print(f"late, so cut short to smoke tests at least (--whole runs all): {', '.join(cut_short)}")
    print(f"logs in {LOGS.relative_to(ROOT)}")
    for outcome in done:
        print(*outcome.closing, sep="\n", end="\n" if outcome.closing else "")
    return int(any(outcome.result != "passed" for outcome in done))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
