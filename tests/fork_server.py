"""Engines as forks of one process that has imported them: of a start's 55 s on one core, imports are 50.

An engine's server imports the same modules in several processes, one after the other. Here one process
imports them and forks whoever serves, and an engine forks what it would spawn. All else is the engine's own.

    python -m tests.fork_server SOCKET [ARGUMENT...]

has an engine forked that runs with these arguments, and ends with it. It leads a group of processes, which
the engine joins. The engine's own module says what is imported (``prepare``), under which variables
(``environment``), and what a fork runs (``main``).
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_ORDER_NBYTES: Final = 1 << 20
_PR_SET_PDEATHSIG: Final = 1


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
            cwd=Path(__file__).parents[1],
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
    while listener.fileno() in select.select([listener.fileno(), asked_by], [], [])[0]:
        connection, _ = listener.accept()
        with connection:
            message, files, _, _ = socket.recv_fds(connection, _ORDER_NBYTES, 3)
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            if os.fork() == 0:
                os.close(asked_by)
                listener.close()
                order = json.loads(message)
                _become(order, connection)
                engine.main(order["arguments"])
                return


def _become(order: Mapping[str, Any], connection: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.setpgid(0, order["group"])  # fails where whoever asked has ended
    connection.send(str(os.getpid()).encode())
    connection.close()
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))


def ask(path: str, arguments: list[str]) -> None:
    """Has an engine forked, passes on to it that it is to end, and waits for that."""
    order = {"arguments": arguments, "environment": dict(os.environ), "group": os.getpgrp()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        socket.send_fds(connection, [json.dumps(order).encode()], [0, 1, 2])
        engine = os.pidfd_open(int(connection.recv(16)))
    signal.signal(signal.SIGTERM, lambda number, _: signal.pidfd_send_signal(engine, number))
    select.select([engine], [], [])


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        serve(socket.socket(fileno=int(sys.argv[1])), importlib.import_module(sys.argv[2]))
    else:
        ask(sys.argv[1], sys.argv[2:])
