"""``kvxfer bench setup``: what an agent costs before it moves a byte, and while it moves none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

from kvxfer.bench.errors import BenchError
from kvxfer.bench.report import shown
from kvxfer.bench.report.document import Part, figures_table
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.course import Progress, Say, result_of
from kvxfer.bench.run.options import Option, check
from kvxfer.bench.run.stats import spread

FIGURES = {
    "import_ms": "imports all of kvxfer, above numpy's own import; from bytecode, as installed",
    "create_ms": "makes the first agent of a process; it listens when this returns",
    "register_ms": "registers the first region: its layout, and the modules that only caches need",
    "connect_ms": "connects to another process on this host: authenticated, rails up, regions known",
    "first_write_ms": "writes the first page of the session, until the source sees it done",
    "idle_cpu_cores": "processor time in a second of the process with one idle session, heartbeats included",
    "rss_mib": "resident memory of one agent and one session, above Python with numpy",
    "threads": "threads of the agent",
}

_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class SetupOptions:
    """Import, create and connect an agent, and let it idle.

    kvxfer bench setup --transport tcp --iterations 3
    """

    transport: Annotated[str, Option("The transport.", one_of=("shm", "tcp"))] = "shm"
    iterations: Annotated[int, Option("Number of iterations, each with two new processes.", at_least=1)] = 5
    idle_s: Annotated[
        float, Option("How long the idle processes are measured.", above=0, at_most=_TIMEOUT_S / 2)
    ] = 2.0

    def __post_init__(self) -> None:
        check(self)


def run(options: SetupOptions, progress: Say) -> Message:
    """Runs it and returns the result (`FIGURES`) as one JSON object."""
    seen = []
    # An installed package has bytecode. A tree in use may not, or that of older files, and an
    # environment may forbid to write it: the processes here share a folder of their own.
    with tempfile.TemporaryDirectory(prefix="kvxfer-bytecode-") as bytecode:
        environment = _environment(bytecode)
        progress(Progress(0, options.iterations, "bytecode"))
        _once(replace(options, idle_s=0.1), environment)
        for iteration in range(options.iterations):
            progress(Progress(iteration, options.iterations, "two fresh processes"))
            seen.append(_once(options, environment))
    figures = {
        name: spread((one[name] for one in seen), digits=4 if name == "idle_cpu_cores" else 2)
        for name in FIGURES
    }
    return result_of("setup", options, lambda: figures)


def parts(result: Message) -> Iterator[Part]:
    """Yields what a result is shown as."""
    yield shown.arguments(result, *FIGURES)
    yield figures_table(result, FIGURES)


def _once(options: SetupOptions, environment: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, "-P", "-m", "kvxfer.bench.setup.process"]
    ours, theirs = os.pipe()
    with subprocess.Popen(
        [*command, json.dumps({"transport": options.transport})],
        stdin=ours,
        stdout=subprocess.PIPE,
        env=environment,
    ) as server:
        os.close(ours)
        try:
            assert server.stdout is not None
            address = server.stdout.readline().decode().strip()
            if not address:
                raise BenchError("the process to connect to ended early")
            told = {"transport": options.transport, "address": address, "idle_s": options.idle_s}
            measured = subprocess.run(
                [*command, json.dumps(told)],
                capture_output=True,
                check=False,
                timeout=_TIMEOUT_S,
                env=environment,
            )
        finally:
            os.close(theirs)  # the server ends with its standard input
    if measured.returncode != 0:
        last = measured.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise BenchError(f"the measured process failed: {' '.join(last)}")
    result: dict[str, float] = json.loads(measured.stdout)
    return result


def _environment(bytecode: str) -> dict[str, str]:
    # The children import what their parent imports. One thread of BLAS: its workers would spin.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": path, "PYTHONPYCACHEPREFIX": bytecode, "OPENBLAS_NUM_THREADS": "1"}
