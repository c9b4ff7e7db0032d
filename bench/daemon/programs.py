"""Runs the daemon, and an empty application of the same framework, as programs observed from outside."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlencode

from kvxfer.bench.errors import BenchError
from kvxfer.bench.run.options import REPLY_TIMEOUT_S

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_LOOK_S: Final = 0.002


class Program:
    """A program that serves HTTP on a unix socket, in a folder of its own. ``with`` ends it.

    Attributes
    ----------
    up_s, up_cpu_s
        Time from its start to its first answer, and the processor time that it had used by then.
    ready_s
        Time until it reported that it is ready.
    """

    def __init__(self, command: list[str], folder: tempfile.TemporaryDirectory[str], api: Path) -> None:
        self._folder = folder
        self.folder = Path(folder.name)
        self.api = api
        started = time.perf_counter()
        with (self.folder / "log").open("wb") as log:
            # -P: uses the installed package, even if the working folder has another.
            self._process = subprocess.Popen(
                [sys.executable, "-P", *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            self._await("/healthz", started + REPLY_TIMEOUT_S)
            self.up_s, self.up_cpu_s = time.perf_counter() - started, self.cpu_s()
            self._await("/readyz", started + REPLY_TIMEOUT_S)
        except BaseException:
            self.end()
            raise
        self.ready_s = time.perf_counter() - started

    def _await(self, path: str, until_s: float) -> None:
        while True:
            try:
                with self.client() as client:
                    status, _ = client.ask("GET", path)
                if status != 503:  # an empty application has no readiness to report
                    return
            except OSError:
                pass
            if self._process.poll() is not None or time.perf_counter() > until_s:
                raise BenchError(f"the program does not answer: {(self.folder / 'log').read_text()[-2000:]}")
            time.sleep(_LOOK_S)

    def client(self) -> Client:
        """Returns a connection to the program, as the program's own user."""
        return Client(self.api)

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._process.pid

    def cpu_s(self) -> float:
        """Returns the processor time that it has used, in hundredths of a second."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def rss_nbytes(self) -> int:
        """Returns its resident memory in bytes."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def num_fds(self) -> int:
        """Returns how many descriptors it has open."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def end(self) -> None:
        """Ends it. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _new_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kvxfer")  # short enough for a socket's path


def empty() -> Program:
    """Starts the empty application."""
    folder = _new_folder()
    api = Path(folder.name) / "api.sock"
    return Program(["-m", "kvxfer.bench.daemon.empty_app", str(api)], folder, api)


def daemon(*arguments: str) -> Program:
    """Starts a daemon with an agent of its own, no pool, and no limit on requests."""
    folder = _new_folder()
    place = Path(folder.name)
    places = ["--state", str(place / "state"), "--runtime", str(place / "run"), "--listen", ""]
    return Program(["-m", "kvxfer", "serve", *places, *arguments], folder, place / "run/api.sock")


class Client:
    """One connection over a unix socket. It adds little time of its own to what it measures."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = _Connection(path)

    def ask(self, method: str, path: str, body: Any = None, **query: Any) -> tuple[int, bytes]:
        """Returns the status and body of an answer; raises `OSError` if there is none."""
        headers = {}
        encoded = None
        if body is not None:
            encoded = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        try:
            target = f"{path}?{urlencode(query)}" if query else path
            self._connection.request(method, target, encoded, headers)
            answer = self._connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ConnectionError(f"no answer to {method} {path}: {error}") from error

    def get(self, path: str, **query: Any) -> Any:
        """Returns the answer of a path; raises `BenchError` unless it is a success."""
        status, body = self.ask("GET", path, **query)
        if status != 200:
            raise BenchError(f"GET {path} answered {status}: {body[:200].decode(errors='replace')}")
        return json.loads(body)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("node", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
