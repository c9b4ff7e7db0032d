"""Other software that does the same work: where it is installed, and its two ends as processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvxfer.bench.errors import BenchError, CheckFailedError
from kvxfer.bench.run.channel import Channel, Message
from kvxfer.bench.run.option_checks import check_one_of

_ADAPTERS = Path(__file__).resolve().parent / "baselines"
_TREE = _ADAPTERS.parents[2]
#: Where ``make baselines`` builds, unless this variable of the environment names another folder.
ENVIRONMENTS_VARIABLE = "KVXFER_BASELINES"

# Importing NIXL, creating its agent and faulting in the memory come before the first reply.
_OPEN_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 5.0
_STDERR_LINES = 8


class BaselineError(BenchError):
    """A baseline crashed, hung or refused; the message ends with the last lines that it wrote."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """One way to run other software. ``name`` stands in tables and in JSON."""

    name: str
    #: What ``--against`` names; several baselines may share it.
    software: str
    #: The interpreter and the script that serve one end (baselines/worker.py says the protocol).
    command: tuple[str, ...]
    #: How its bytes go, by the transport that is asked for.
    paths: dict[str, str]
    options: Message = field(default_factory=dict)
    #: Added to the environment of both ends where the user has not set them.
    environment: dict[str, str] = field(default_factory=dict)
    #: What a reader of its figures has to know.
    notes: tuple[str, ...] = ()

    @property
    def is_installed(self) -> bool:
        return Path(self.command[0]).exists()


def tree() -> Path:
    """Returns the source tree, with whose Makefile environments are set up; here where there is none."""
    return _TREE if (_TREE / "Makefile").exists() else Path.cwd()


def environments_dir() -> Path:
    """Returns the folder with the environments: of the source tree, or here where there is none."""
    if named := os.environ.get(ENVIRONMENTS_VARIABLE):
        return Path(named)
    return tree() / ".baselines"


def known_baselines() -> tuple[Baseline, ...]:
    """Returns every baseline, installed or not, in the order of tables."""

    def command(software: str) -> tuple[str, ...]:
        python = environments_dir() / software / "bin" / "python"
        return (str(python), str(_ADAPTERS / "worker.py"), f"{software}_adapter")

    nixl_paths = {"shm": "cross-memory attach (UCX)", "tcp": "tcp (UCX)"}
    return (
        Baseline(
            "nixl",
            "nixl",
            command("nixl"),
            nixl_paths,
            options={"progress_thread": False, "pause": False},
            notes=("nixl: no progress thread, both ends poll",),
        ),
        Baseline(
            "nixl+thread",
            "nixl",
            command("nixl"),
            nixl_paths,
            # On two cores a caller that spins takes the thread's core; with a pause it is several times
            # faster (bench compare --work latency).
            options={"progress_thread": True, "pause": True},
            notes=("nixl+thread: its default; a thread at each end progresses, callers pause 20 us a poll",),
        ),
        Baseline(
            "mooncake",
            "mooncake",
            command("mooncake"),
            {"shm": "tcp", "tcp": "tcp"},
            # 1,024 queued and 1,024 waiting for admission are its defaults: beyond them a batch fails.
            # The setting goes to 65,535, and is faster than smaller batches.
            options={"batch_pages": 32768},
            environment={"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535"},
            notes=(
                "mooncake: by default it fails on batches of more than 2,048 descriptors; its queue is set "
                "to 65,535, its most, and batches are split at 32,768",
            ),
        ),
    )


def chosen_baselines(software: tuple[str, ...], known: tuple[Baseline, ...]) -> tuple[Baseline, ...]:
    """Returns the baselines of ``--against``; raises when one is unknown or not installed."""
    names = dict.fromkeys(baseline.software for baseline in known)
    for name in software:
        check_one_of("against", name, names)
    chosen = tuple(baseline for baseline in known if baseline.software in software)
    for baseline in chosen:
        if not baseline.is_installed:
            raise BenchError(
                f"{baseline.software} is not installed: no {baseline.command[0]}; "
                "`make baselines` installs it, or --against names others"
            )
    return chosen


class BaselineEnd:
    """One process of a baseline. What it writes to stderr is kept, and ends the error's message."""

    def __init__(self, baseline: Baseline, role: str, options: Message) -> None:
        ours, theirs = socket.socketpair()
        self.baseline = baseline
        self.role = f"{baseline.name} {role}"
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        arguments = [json.dumps({**options, **baseline.options, "role": role})]
        with theirs:
            self._process = subprocess.Popen(
                [*baseline.command, *arguments, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
                env={**baseline.environment, **_clean_environment()},
            )
        self._channel = Channel(ours, self.role)

    def send(self, kind: str, **fields: Any) -> None:
        with self._in_words():
            self._channel.send(kind, **fields)

    def reply(self, timeout_s: float) -> Message:
        with self._in_words():
            return self._channel.receive(timeout_s)

    def call(self, kind: str, timeout_s: float = _OPEN_TIMEOUT_S, **fields: Any) -> Message:
        """Sends a command and waits for its reply."""
        self.send(kind, **fields)
        return self.reply(timeout_s)

    def close(self) -> None:
        """Closes the channel, upon which the process ends."""
        self._channel.close()

    def end(self) -> None:
        """Closes the channel and waits for the process, which is killed if it stays."""
        self.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.close()

    @property
    def has_died(self) -> bool:
        """Whether the process ended by itself, and not well."""
        return self._process.poll() not in (None, 0)

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except CheckFailedError:
            raise
        except (BenchError, ValueError, KeyError) as error:
            hint = "; `make baselines` installs it anew" if "ModuleNotFoundError" in str(error) else ""
            raise BaselineError(f"{error}{hint}{self.ending()}") from error

    def ending(self) -> str:
        """Returns how the process ended, if it has, and the last lines that it wrote."""
        try:
            # A process that closed its channel is about to end.
            status = self._process.wait(0.5)
            how = f" (killed by signal {-status})" if status < 0 else f" (exit status {status})"
        except subprocess.TimeoutExpired:
            how = " (still running)"
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").splitlines()[-_STDERR_LINES:]
        return how + ("; it wrote last:\n  " + "\n  ".join(lines) if lines else "; it wrote nothing")


class BaselinePair:
    """The source and the destination of a baseline, brought together; ``with`` ends both."""

    def __init__(self, baseline: Baseline, options: Message, seeds: tuple[int, int]) -> None:
        """``seeds`` are those of the order in which the source and the destination name pages."""
        self.baseline = baseline
        self._ends: list[BaselineEnd] = []
        try:
            for role, (seed, far_seed) in (("source", seeds), ("destination", seeds[::-1])):
                fields = {**options, "seed": seed, "far_seed": far_seed}
                self._ends.append(BaselineEnd(baseline, role, fields))
        except OSError as error:
            self.end()
            raise BaselineError(f"{baseline.name} cannot be started: {error}") from error
        self.source, self.destination = self._ends
        self.opened: Message = {}
        self.connect_ms = 0.0

    def open(self, active: BaselineEnd) -> None:
        """Creates both agents and connects them; ``active`` is the end that will post."""
        for end in self._ends:
            end.send("open")
        opened = {end: end.reply(_OPEN_TIMEOUT_S) for end in self._ends}
        passive = self.destination if active is self.source else self.source
        self.opened = opened[active]
        self.connect_ms = active.call("connect", contact=opened[passive]["contact"])["connect_ms"]
        passive.call("connect", contact=opened[active]["contact"])

    def end(self) -> None:
        """Ends both processes; one that waits for the other sees it gone at once."""
        for end in self._ends:
            end.close()
        for end in self._ends:
            end.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An end whose peer died fails as well, and often first: both have to be told.
        others = [
            end for end in self._ends if isinstance(error, BaselineError) and end.role not in str(error)
        ]
        died = [f"{end.role} process{end.ending()}" for end in others if end.has_died]
        self.end()
        if died:
            raise BaselineError("\n".join([str(error), *died])) from error


def _clean_environment() -> dict[str, str]:
    # Another interpreter, with packages of its own.
    without = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
    kept = {name: value for name, value in os.environ.items() if name not in without}
    # As kvxfer's own set-up is measured: numpy's BLAS starts no threads.
    return {**kept, "OPENBLAS_NUM_THREADS": "1"}
