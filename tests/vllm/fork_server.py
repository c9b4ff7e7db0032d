"""Engines as forks of one process that has imported vLLM: of a start's 55 s on one core, imports are 50.

``vllm serve`` imports the same modules in three processes, one after the other. Here one process imports
them and forks whoever serves, and an engine forks what it would spawn. All else is vLLM's own.

    python -m tests.vllm.fork_server SOCKET [ARGUMENT...]

runs ``vllm ARGUMENT...`` so, and ends with it. It leads a group of processes, which the engine joins.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import multiprocessing
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

#: What an engine of any kind imports, but for its model.
MODULES: Final = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)
_ORDER_NBYTES: Final = 1 << 20
_PR_SET_PDEATHSIG: Final = 1


@functools.cache
def start() -> Path:
    """Starts what forks, which ends with this one, and returns its socket: who asks early waits."""
    from kvxfer.bench.engines import vllm_server  # takes longer than all else that `ask` does

    folder = Path(tempfile.mkdtemp(prefix="kvxfer-tests-"))
    atexit.register(shutil.rmtree, folder)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(folder / "forks"))
        listener.listen(64)
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(listener.fileno())],
            cwd=Path(__file__).parents[2],
            env={**os.environ, **vllm_server.ENVIRONMENT},
            stdin=subprocess.PIPE,  # it ends with this process
            pass_fds=[listener.fileno()],
        )
    atexit.register(process.communicate)
    return folder / "forks"


def serve(listener: socket.socket) -> None:
    """Forks for all who ask, until its input ends. In a fork it returns when the engine has ended."""
    asked_by = os.dup(0)
    _import()
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
                _become(json.loads(message), connection)
                return


def _import() -> None:
    for module in MODULES:
        importlib.import_module(module)
    # On CPUs vLLM spawns, whatever it is told.
    forks = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: forks  # type: ignore[assignment]
    # A fork that looks for garbage here copies what it looks at: 3 s in each engine.
    gc.collect()
    gc.freeze()


def _become(order: dict[str, Any], connection: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.setpgid(0, order["group"])  # fails where whoever asked has ended
    connection.send(str(os.getpid()).encode())
    connection.close()
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.path[1:1] = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.argv = ["vllm", *order["arguments"]]
    sys.modules["vllm.entrypoints.cli.main"].main()


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
        serve(socket.socket(fileno=int(sys.argv[1])))
    else:
        ask(sys.argv[1], sys.argv[2:])
