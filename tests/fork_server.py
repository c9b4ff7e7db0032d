"""Processes as forks of one that has imported what they need.

A start of an engine takes 55 s on one core, 50 of which are imports: its server imports the same modules in
several processes, one after the other. Here one process imports them and forks whoever serves, and an engine
forks what it would spawn. All else is the engine's own.

    python -m tests.fork_server SOCKET [ARGUMENT...]

has an engine forked that runs with these arguments, and ends with it. It leads a group of processes, which
the engine joins. The engine's own module says what is imported (``prepare``), under which variables
(``environment``), and what a fork runs (``main``).

`Forked` is a Python program with kvxfer, as a child of this process, in a tenth of the time (`tests.forked`).
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
_ORDER_NBYTES: Final = 1 << 20
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_adopting: Final = threading.Lock()


@functools.cache
def start(engine: str) -> Path:
    """Starts what forks, which ends with this one, and returns its socket: who asks early waits.

    ``engine`` is the name of the module that knows it.
    """
    # Takes longer than all else that `ask` does.
    environment: Mapping[str, str] = importlib.import_module(engine).environment()
    folder = Path(tempfile.mkdtemp(prefix="kvxfer-tests-"))
    atexit.register(shutil.rmtree, folder)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(folder / "forks"))
        listener.listen(64)
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(listener.fileno()), engine],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,  # it ends with this process
            pass_fds=[listener.fileno()],
        )
    atexit.register(process.communicate)
    return folder / "forks"


def serve(listener: socket.socket, engine: Any) -> None:
    """Forks for all who ask, until its input ends. In a fork it returns when the engine has ended."""
    asked_by = os.dup(0)
    engine.prepare()
    # A fork that looks for garbage here copies what it looks at: 3 s in each engine.
    gc.collect()
    gc.freeze()
    # Those who ask wait for their engines; here nobody does.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while listener in wait([listener, asked_by]):
        connection, _ = listener.accept()
        with connection:
            message, files, _, _ = socket.recv_fds(connection, _ORDER_NBYTES, 3)
            if os.fork() == 0:
                os.close(asked_by)
                listener.close()
                order = json.loads(message)
                _become(order, files, connection)
                engine.main(order["arguments"])
                return
            for file in files:
                os.close(file)


def _become(order: Mapping[str, Any], files: Sequence[int], connection: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if order["adopted"]:
        between = os.getpid()
        if os.fork() != 0:
            os._exit(0)
        while os.getppid() == between:  # until the kernel has given this process to the one that asked
            os.sched_yield()
    else:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.setpgid(0, order["group"])  # fails where whoever asked has ended
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(order["folder"])
    resource.setrlimit(resource.RLIMIT_NOFILE, order["open_files"])
    connection.send(str(os.getpid()).encode())
    connection.close()
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))


def ask(path: str, arguments: list[str]) -> None:
    """Has an engine forked, passes on to it that it is to end, and waits for that."""
    engine = os.pidfd_open(_forked(path, arguments, (0, 1, 2), dict(os.environ)))
    signal.signal(signal.SIGTERM, lambda number, _: signal.pidfd_send_signal(engine, number))
    select.select([engine], [], [])


def _forked(
    path: str,
    arguments: Sequence[str],
    files: Sequence[int],
    environment: Mapping[str, str],
    folder: str | Path = ROOT,
    *,
    adopted: bool = False,
) -> int:
    order = {
        "arguments": arguments,
        "environment": environment,
        "group": os.getpgrp(),
        "folder": str(folder),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "adopted": adopted,
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        socket.send_fds(connection, [json.dumps(order).encode()], files)
        return int(connection.recv(16))


class Forked(subprocess.Popen[Any]):
    """``python -c PROGRAM ARGUMENT...`` as a fork of a process that has imported kvxfer.

    It is a child of this process. Options are those of `subprocess.Popen`, of which it takes pipes, ``env``
    and ``cwd``.
    """

    def __init__(self, program: str, *arguments: str, engine: str = "tests.forked", **options: Any) -> None:
        """Takes the module that says what is imported."""
        self._engine = engine
        super().__init__((program, *arguments), **options)

    def _execute_child(  # the one step of Popen that starts a process
        self, args: Any, executable: Any, preexec: Any, close: Any, fds: Any, cwd: Any, env: Any, *more: Any
    ) -> None:
        pipes = more[3:9]  # for each of the three what is read and what is written, or -1
        files = [file if file >= 0 else number for number, file in enumerate((pipes[0], pipes[3], pipes[5]))]
        path = str(start(self._engine))
        libc = ctypes.CDLL(None)
        with _adopting:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                self.pid = _forked(
                    path, args, files, env or dict(os.environ), cwd or Path.cwd(), adopted=True
                )
            finally:
                libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run(program: str, *arguments: str, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a `Forked` to its end, and returns what it printed."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Forked(program, *arguments, **pipes, text=True, **options) as process:
        try:
            printed = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(arguments, process.returncode, *printed)


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        serve(socket.socket(fileno=int(sys.argv[1])), importlib.import_module(sys.argv[2]))
    else:
        ask(sys.argv[1], sys.argv[2:])
