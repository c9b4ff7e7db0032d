"""Other software that does the same work: where it is installed, and its two ends as processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from kvxfer.bench.errors import BenchError, CheckFailedError
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.options import REPLY_TIMEOUT_S
from kvxfer.bench.run.process import Worker

_TREE = Path(__file__).resolve().parents[2]
#: Where ``make baselines`` builds, unless this variable of the environment names another folder.
ENVIRONMENTS_VARIABLE = "KVXFER_BASELINES"

SOFTWARE = ("nixl", "mooncake", "facade")
_STDERR_LINES = 8


class BaselineError(BenchError):
    """A baseline crashed, hung or refused; the message ends with the last lines that it wrote."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """One way to run other software. ``name`` stands in tables and in JSON."""

    name: str
    #: What ``--against`` names; several baselines may share it.
    software: str
    #: The interpreter of its environment.
    python: str
    #: The module with its ``create(options)``, for `kvxfer.bench.compare.end`.
    adapter: str
    #: Requested transport -> how this baseline carries the bytes.
    paths: dict[str, str]
    options: Message = field(default_factory=dict)
    #: Variables for the environment of both ends, unless the user has set them.
    environment: dict[str, str] = field(default_factory=dict)
    #: What a reader must know about its figures.
    notes: tuple[str, ...] = ()

    @property
    def is_installed(self) -> bool:
        return Path(self.python).exists()


def tree() -> Path:
    """Returns the source tree, whose Makefile sets up environments; the working folder if there is none."""
    return _TREE if (_TREE / "Makefile").exists() else Path.cwd()


def known_baselines() -> tuple[Baseline, ...]:
    """Returns every baseline, installed or not, in the order of tables."""
    environments = Path(os.environ.get(ENVIRONMENTS_VARIABLE) or tree() / ".baselines")

    def made(name: str, software: str, paths: dict[str, str], **more: Any) -> Baseline:
        python = str(environments / software / "bin" / "python")
        adapter = f"kvxfer.bench.compare.adapters.{software}_adapter"
        return Baseline(name, software, python, adapter, paths, **more)

    over_tcp = ("tcp", "ucx", "libfabric")
    nixl_paths = {"shm": "cross-memory attach (UCX)"} | dict.fromkeys(over_tcp, "tcp (UCX)")
    return (
        Baseline(
            "kvxfer as nixl",
            "facade",
            sys.executable,
            "kvxfer.bench.compare.adapters.facade_adapter",
            {transport: f"{transport}, foreign memory" for transport in ("shm", *over_tcp)},
            options={"progress_thread": False, "pause": False},
            notes=(
                "kvxfer as nixl: the program of the nixl rows, with kvxfer.connectors.nixl in NIXL's place",
            ),
        ),
        made(
            "nixl",
            "nixl",
            nixl_paths,
            options={"progress_thread": False, "pause": False},
            notes=(
                "nixl: no progress thread, both ends poll; over shm it reads the other process's memory, as "
                "kvxfer does with --memory foreign; it posts one prepared transfer again, while kvxfer "
                "makes each write anew",
            ),
        ),
        made(
            "nixl+thread",
            "nixl",
            nixl_paths,
            # On two cores a caller that spins takes the thread's core; with a pause it is several times
            # faster (bench compare --work latency).
            options={"progress_thread": True, "pause": True},
            notes=(
                "nixl+thread: its default: a progress thread at each end; callers pause 20 us between polls",
            ),
        ),
        made(
            "mooncake",
            "mooncake",
            dict.fromkeys(("shm", *over_tcp), "tcp"),
            # 1,024 queued and 1,024 waiting for admission are its defaults: beyond them a batch fails.
            # The setting goes to 65,535, and is faster than smaller batches.
            options={"batch_pages": 32768},
            environment={"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535"},
            notes=(
                "mooncake: by default it fails on batches of more than 2,048 descriptors; its queue is set "
                "to 65,535, its maximum, and batches are split at 32,768; its non-CUDA wheel uses tcp",
            ),
        ),
    )


def chosen_baselines(software: tuple[str, ...], known: tuple[Baseline, ...]) -> tuple[Baseline, ...]:
    """Returns the baselines of ``--against``; raises when one is unknown or not installed."""
    chosen = tuple(baseline for baseline in known if baseline.software in software)
    for baseline in chosen:
        if not baseline.is_installed:
            raise BenchError(
                f"{baseline.software} is not installed: there is no {baseline.python}; run `make baselines`, "
                "or name other software with --against"
            )
    return chosen


class BaselineWorker(Worker):
    """One process of a baseline. Its output is kept; an error's message ends with it."""

    def __init__(self, baseline: Baseline, role: str, fields: Message) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        super().__init__(
            "compare.end:BaselineEnd",
            {**fields, **baseline.options, "role": role, "adapter": baseline.adapter},
            f"{baseline.name} {role}",
            python=(baseline.python,),
            environment={**baseline.environment, **_clean_environment()},
            log=self._log,
        )

    def send(self, kind: str, descriptors: tuple[int, ...] = (), **fields: Any) -> None:
        with self._in_words():
            super().send(kind, descriptors, **fields)

    def reply(self, timeout_s: float = REPLY_TIMEOUT_S) -> Message:
        with self._in_words():
            return super().reply(timeout_s)

    def end(self) -> None:
        super().end()
        self._log.close()

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except (CheckFailedError, BaselineError):
            raise
        except (BenchError, ValueError, KeyError) as error:
            hint = "; `make baselines` installs it anew" if "ModuleNotFoundError" in str(error) else ""
            raise BaselineError(f"{error}{hint}{self.ending()}") from error

    def ending(self) -> str:
        """Returns how the process ended, if it has, and its last lines of output."""
        try:
            # A process that closed its channel is about to end.
            status = self.process.wait(0.5)
            how = f" (killed by signal {-status})" if status < 0 else f" (exit status {status})"
        except subprocess.TimeoutExpired:
            how = " (still running)"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()[-_STDERR_LINES:]
        return how + ("; it wrote last:\n  " + "\n  ".join(lines) if lines else "; it wrote nothing")


class BaselinePair:
    """The source and the destination of a baseline, brought together; ``with`` ends both."""

    def __init__(self, baseline: Baseline, options: Message, seeds: tuple[int, int]) -> None:
        """``seeds``: for the order of pages at the source and at the destination."""
        self.baseline = baseline
        self._ends: list[BaselineWorker] = []
        try:
            for role, (seed, far_seed) in (("source", seeds), ("destination", seeds[::-1])):
                fields = {**options, "seed": seed, "far_seed": far_seed}
                self._ends.append(BaselineWorker(baseline, role, fields))
        except OSError as error:
            self.end()
            raise BaselineError(f"{baseline.name} cannot be started: {error}") from error
        self.source, self.destination = self._ends
        self.opened: Message = {}
        self.connect_ms = 0.0

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(end.pid for end in self._ends)

    def open(self, active: Worker) -> None:
        """Creates both agents and connects them; ``active`` is the end that will post."""
        for end in self._ends:
            end.send("open")
        opened = {end.role: end.reply() for end in self._ends}
        passive = self.destination if active is self.source else self.source
        self.opened = opened[active.role]
        self.connect_ms = active.call("connect", contact=opened[passive.role]["contact"])["connect_ms"]
        passive.call("connect", contact=opened[active.role]["contact"])

    def end(self) -> None:
        """Ends both processes. A process that waits for the other notices at once that it is gone."""
        for end in self._ends:
            end.channel.close()
        for end in self._ends:
            end.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()


def _clean_environment() -> dict[str, str]:
    # Another interpreter, with packages of its own.
    without = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
    kept = {name: value for name, value in os.environ.items() if name not in without}
    # As in the measurement of kvxfer's own set-up: numpy's BLAS starts no threads.
    return {**kept, "OPENBLAS_NUM_THREADS": "1"}
