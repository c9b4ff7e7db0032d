"""``make gpu-check`` (``kvxfer bench gpu``): what works on this machine's GPU, and copies beside limits.

Everything runs in processes of its own, each of which ends within a bound: what breaks a context, or does
not end, is told and takes nothing else along. What no time is left for is named.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Final

from kvxfer.bench.gpu import step as gpu_step
from kvxfer.bench.gpu import tests as gpu_tests
from kvxfer.bench.gpu.shown import parts as shown_parts
from kvxfer.bench.gpu.step import Step
from kvxfer.bench.report import machine
from kvxfer.bench.report.document import print_parts
from kvxfer.bench.run.options import Option, check
from kvxfer.gpu.availability import Availability, availability

EXIT_WRONG, EXIT_NO_GPU = 1, 3
#: Of a group of figures whose bytes were wrong, and which said so; not Python's own for an exception.
EXIT_SAID: Final = 4
#: What `kvxfer.bench.gpu.figures` measures, in the order in which it is worth having, should time be short.
GROUPS: Final = (
    "pages",
    "litmus",
    "trigger",
    "other processes, cudaIpc",
    "other processes, expandable segments",
    "other processes, pool",
    "layouts",
    "host",
)

# By what is worth knowing first. Each waits for facts and bounds them by 60 s itself.
_TESTS: Final = (
    "loading",
    "copies",
    "agents",
    "handles",
    "pool",
    "triggers",
    "stream_waits",
    "litmus",
    "device_header",
    "hand_over",
)
# So many files at a time: none of them measures anything.
_AT_A_TIME: Final = 4
_FILE_S: Final = 150.0
_TEST_S: Final = 60.0
# What the figures are left at least, of which each group needs about a quarter of a minute.
_FIGURES_S: Final = 180.0
_FIGURE_S: Final = 75.0
_FIGURES_COMMAND = (sys.executable, "-m", "kvxfer.bench.gpu.figures")


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """Test kvxfer on this machine's GPU, and compare copies with limits of the same run.

    `make gpu-check` runs this. It prints a table at the end. The status is 1 if something is wrong, and 3
    without a GPU.

    kvxfer bench gpu --only figures --out gpu.json
    """

    device: Annotated[int, Option("Index of the GPU.", at_least=0)] = 0
    total_mib: Annotated[int, Option("Size of a copy of pages.", at_least=1)] = 1024
    rounds: Annotated[int, Option("How often to measure each figure.", at_least=1)] = 7
    seconds: Annotated[float, Option("Time limit for everything.", above=0, value="SECONDS")] = 400.0
    only: Annotated[
        tuple[str, ...], Option("Parts to run: tests, figures.", one_of=("tests", "figures"), value="PART")
    ] = ("tests", "figures")
    group: Annotated[
        str, Option("Measure only this group of figures, in this process.", one_of=("", *GROUPS))
    ] = ""
    out: Annotated[str, Option("Write the result there as JSON while it is measured.", value="FILE")] = ""
    logs: Annotated[
        str, Option("Directory of the outputs of tests and figures, one file each.", value="DIR")
    ] = "build/gpu-check-logs"

    def __post_init__(self) -> None:
        check(self)


@dataclass(slots=True)
class Check:
    """A run of everything, and what is known so far."""

    options: GpuOptions
    until: float
    result: dict[str, Any]

    @property
    def logs(self) -> Path:
        return Path(self.options.logs)

    def left_s(self) -> float:
        return self.until - time.monotonic()

    def keep(self, kind: str, what: dict[str, Any]) -> None:
        """Keeps a result, in the file as well, so that it is there if this process is ended."""
        self.result[kind].append(what)
        if self.options.out:
            Path(self.options.out).write_text(json.dumps(self.result, indent=1) + "\n")

    def not_run(self, words: str) -> None:
        self.keep("not_run", {"words": words})
        _tell(f"not run: {words}")

    def wrong(self, words: str, shown: str = "") -> None:
        self.keep("wrong", {"words": words})
        _tell(f"WRONG: {words}" + (f"\n{shown}" if shown else ""))


def run(options: GpuOptions) -> int:
    """Prints the table and returns an exit status: 0, 1 where something is wrong, 3 where there is no GPU."""
    found = availability(options.device)
    if not found.usable:
        print(f"gpu-check: nothing was measured: {found.reason}", file=sys.stderr)
        return EXIT_NO_GPU
    if options.group:
        from kvxfer.bench.gpu import figures as group

        return group.run(group.Options(options.group, options.device, options.total_mib, options.rounds))
    everything = Check(options, time.monotonic() + options.seconds, _nothing_yet(found, options))
    shutil.rmtree(everything.logs, ignore_errors=True)
    parts: dict[str, Callable[[Check], None]] = {"tests": tests, "figures": figures}
    try:
        for name in options.only:
            parts[name](everything)
    finally:
        print_parts(shown_parts(everything.result))
    return EXIT_WRONG if everything.result["wrong"] else 0


def tests(check: Check) -> None:
    """Runs the tests, several files at a time."""
    reserved = min(_FIGURES_S, check.left_s() / 2)

    def run(name: str) -> gpu_tests.Tests:
        return gpu_tests.run(
            f"tests/gpu/test_{name}.py", _FILE_S, _TEST_S, lambda: check.left_s() - reserved, check.logs
        )

    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        for found in pool.map(run, _TESTS):
            if found.state == "not run":
                check.not_run(f"{found.file}: no time is left")
                continue
            check.keep("tests", asdict(found))
            _tell(f"{found.file}: {found.state}, {found.num_passed} passed, in {found.taken_s:.0f} s")
            for number, words in enumerate(found.wrong):
                check.wrong(words, found.shown if number == 0 else "")


def figures(check: Check) -> None:
    """Measures every group, one after the other, each in a process of its own."""
    for group in GROUPS:
        _figures_of(check, group)


def _figures_of(check: Check, group: str) -> None:
    given = {name: getattr(check.options, name) for name in ("device", "total_mib", "rounds")}
    command = (*_FIGURES_COMMAND, json.dumps({"group": group, **given}))
    outcome = gpu_step.run(Step(f"figures {group}", command, _FIGURE_S), check.left_s(), check.logs)
    if outcome is None:
        check.not_run(f"figures, {group}: no time is left")
        return
    begun = ""
    for line in outcome.output.splitlines():
        if not line.startswith('{"kind": '):
            continue
        try:
            found = json.loads(line)
        except ValueError:
            continue  # torn: its process was ended
        kind = found.pop("kind")
        if kind == "begun":
            begun = found["name"]
        elif kind == "wrong":
            check.wrong(f"{group}, {found['name']}: {found['words']}")
        elif kind == "not run":
            check.not_run(found["words"])
        else:
            check.keep(kind, found)
    _tell(f"figures, {group}: {outcome.taken_s:.0f} s")
    if outcome.status in (0, EXIT_SAID):
        return
    how = "had not ended" if outcome.status is None else f"ended with {outcome.status}"
    where = f" at {begun!r}" if begun else ""
    check.wrong(
        f"figures, {group}: {how} after {outcome.taken_s:.0f} s{where}: see {outcome.log}",
        outcome.last_lines(),
    )


def _nothing_yet(found: Availability, options: GpuOptions) -> dict[str, Any]:
    lists = ("tests", "row", "trigger", "litmus")
    return {
        "bench": "gpu-check",
        "date": date.today().isoformat(),
        "gpu": "" if found.device is None else found.device.name,
        "driver": "{}.{}".format(*found.driver_version),
        **{name: _version(name) for name in ("torch", "cuda-core", "cuda-bindings", "numpy")},
        "machine": machine.describe(),
        "total_mib": options.total_mib,
        "rounds": options.rounds,
        **{name: [] for name in (*lists, "not_run", "wrong")},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "?"


def _tell(words: str) -> None:
    print(f"gpu-check: {words}", flush=True)
