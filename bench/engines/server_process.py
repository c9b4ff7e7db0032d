"""Runs a server in a process group of its own, and ends it with all processes that it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvxfer.bench.errors import BenchError

# Longer than a request waits for a dead prefill engine before decode computes it again.
_REQUEST_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 20.0

# The kernel ends the server when the process that started it ends: 1 is PR_SET_PDEATHSIG.
_LAUNCH = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"


def reserved_port() -> socket.socket:
    """Returns a socket at a free port of loopback. The port stays reserved until the socket is closed.

    Linux lets two sockets with SO_REUSEADDR bind one port as long as neither listens. So a server may listen
    there, while the system gives the port to no other process.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


class ProgramProcess:
    """A program in a process group of its own.

    ``name``: used in errors. ``command``: begins with a path. ``log``: takes the program's output.
    ``environment``: variables besides those of this process. The program ends with the thread that creates
    this object, so that thread must live as long.
    """

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _LAUNCH, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Not a session: Linux divides processors among sessions (autogroups). Engines' threads that
                # wait for each other yield all the time; another thread of the session may then starve
                # for seconds.
                process_group=0,
                env={**os.environ, **(environment or {})},
            )

    @property
    def pid(self) -> int:
        """The program's process id; also the id of the group of all its processes."""
        return self._process.pid

    def wait_until(self, is_up: Callable[[], bool], timeout_s: float) -> Self:
        """Waits until it is up. If it ends or is too slow, raises with the end of its log."""
        deadline = time.monotonic() + timeout_s
        while not is_up():
            if self.has_ended():
                raise BenchError(f"{self.name} ended before it was ready; {self.last_words()}")
            if time.monotonic() > deadline:
                raise BenchError(f"{self.name} was not ready after {timeout_s:g} s; {self.last_words()}")
            time.sleep(0.1)
        return self

    def has_ended(self) -> bool:
        """Whether the process has ended. It is not reaped, so that its group's id is not used again."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def signal(self, number: int) -> None:
        """Sends a signal to every process of the program: ``SIGKILL``, ``SIGSTOP``, ``SIGCONT``."""
        os.killpg(self.pid, number)

    def last_words(self, num_lines: int = 25) -> str:
        """Returns the end of the log, with the file's name."""
        lines = self.log.read_text(errors="replace").splitlines()[-num_lines:]
        return "\n".join([f"the end of {self.log}:", *lines])

    def stop(self) -> None:
        """Ends the program, and kills what is left of its group. Idempotent."""
        if self._process.returncode is not None:
            return
        # A stopped process would not receive the signal.
        self.signal(signal.SIGCONT)
        os.kill(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while not self.has_ended() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.signal(signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


class ServerProcess(ProgramProcess):
    """A program that serves HTTP.

    It listens on a loopback port that the system chooses. If it runs ``within`` a host of its own (a command
    that becomes the server), it listens ``at`` a host and port. ``--port`` is added to ``command``, and
    ``--host`` if it ``takes_host``. It must answer at ``health`` within ``ready_timeout_s``.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        ready_timeout_s: float = 30.0,
        health: str = "/health",
        takes_host: bool = True,
        within: Sequence[str] = (),
        at: tuple[str, int] | None = None,
    ) -> None:
        self._health = health
        self._ready_timeout_s = ready_timeout_s
        self._reserved: socket.socket | None = None
        if at is None:
            self._reserved = reserved_port()
            at = self._reserved.getsockname()
        host: str = at[0]
        self.port: int = at[1]
        self.url = f"http://{host}:{self.port}"
        told = ("--host", host) if takes_host else ()
        super().__init__(name, [*within, *command, *told, "--port", str(self.port)], log, environment)
        self.client = httpx.Client(base_url=self.url, timeout=_REQUEST_TIMEOUT_S)

    def wait_ready(self) -> Self:
        """Waits until the server answers. If it ends or is too slow, raises with the end of its log."""
        return self.wait_until(self._answers, self._ready_timeout_s)

    def _answers(self) -> bool:
        try:
            return self.client.get(self._health).is_success
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        """Ends the server, and kills what is left of its group. Idempotent."""
        self.client.close()
        if self._reserved is not None:
            self._reserved.close()
        super().stop()


class EngineServer(ServerProcess):
    """A server of a model, which reports at ``/metrics`` what it does."""

    def metric(self, name: str, **labels: str) -> float:
        """Returns a metric, summed over its other labels; 0 if there is none."""
        families = text_string_to_metric_families(
            self.client.get("/metrics", follow_redirects=True).raise_for_status().text
        )
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def is_busy(self) -> bool:
        """Whether the engine works on a request, or keeps anything for one."""
        raise NotImplementedError


class RouterServer(ServerProcess):
    """The router (`kvxfer.bench.engines.router`) between engines of these addresses."""

    def __init__(
        self,
        prefills: Sequence[str],
        decodes: Sequence[str],
        log: Path,
        dispatch: str = "sequential",
        **more: Any,
    ) -> None:
        engines = ["--prefill", ",".join(prefills), "--decode", ",".join(decodes)]
        command = [sys.executable, "-m", "kvxfer.bench", "router", *engines, "--dispatch", dispatch]
        super().__init__("the router", command, log, **more)
