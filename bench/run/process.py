"""The processes of a benchmark: a coordinator, and the workers that it commands.

A worker serves an `End`: its public methods, and those of its parts (``part.method``), are its commands.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import operator
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Self

from kvxfer.bench.errors import BenchError
from kvxfer.bench.run.channel import Channel, Message
from kvxfer.bench.run.options import REPLY_TIMEOUT_S

_END_TIMEOUT_S = 5.0
# Where kvxfer is; behind what an interpreter of its own has, whose packages come first.
_ROOT = Path(__file__).resolve().parents[2]
_LAUNCH = "import sys; sys.path.append(sys.argv.pop(1)); from kvxfer.bench.run import process; process.main()"


class End:
    """What a worker process serves. A command takes a message's fields and returns the reply's, or None."""

    def __init__(self, fields: Message, coordinator: Channel, peers: Sequence[Channel] = ()) -> None:
        self.coordinator = coordinator
        self.peers = list(peers)

    async def aclose(self) -> None:
        """Gives back what it holds, when the coordinator has ended."""


class Worker:
    """A child process that serves an `End`; it ends with its channel, and is killed if it does not.

    ``end`` is ``module:Class``, the module without ``kvxfer.bench.``; ``fields`` are its options, ``role`` is
    what errors call it, ``peers`` are its ends of channels to other workers. ``python`` is another
    interpreter, whose ``environment`` is all that it gets; else that is what is added. ``log`` takes what the
    process writes.
    """

    def __init__(
        self,
        end: str,
        fields: Message,
        role: str = "",
        peers: Sequence[socket.socket] = (),
        *,
        python: Sequence[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
        log: IO[bytes] | None = None,
    ) -> None:
        ours, theirs = socket.socketpair()
        numbers = [stream.fileno() for stream in (theirs, *peers)]
        told = json.dumps({"end": end, "fields": fields, "channels": numbers})
        # A child of this interpreter imports what its parent imports: the same path, and nothing before it.
        same = [sys.executable, "-P", "-m", "kvxfer.bench.run.process"]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        with theirs:
            self.process = subprocess.Popen(
                [*([*python, "-c", _LAUNCH, str(_ROOT)] if python else same), told],
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment if python else {**os.environ, "PYTHONPATH": path, **environment},
            )
        self.role = role or end.rpartition(":")[2].lower()
        self.channel = Channel(ours, self.role)

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, kind: str, descriptors: tuple[int, ...] = (), **fields: Any) -> None:
        """Sends a command, whose reply is to be waited for."""
        self.channel.send(kind, descriptors, **fields)

    def reply(self, timeout_s: float = REPLY_TIMEOUT_S) -> Message:
        """Waits for the reply to a command that was sent."""
        return self.channel.receive(timeout_s)

    def call(
        self, kind: str, descriptors: tuple[int, ...] = (), timeout_s: float = REPLY_TIMEOUT_S, **fields: Any
    ) -> Message:
        """Sends a command and waits for its reply."""
        self.send(kind, descriptors, **fields)
        return self.reply(timeout_s)

    def end(self) -> None:
        """Closes the channel and waits for the process. Idempotent."""
        self.channel.close()
        try:
            self.process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()


def call_all(workers: Iterable[Worker], kind: str, **fields: Any) -> list[Message]:
    """Sends a command to all workers at once and waits for every reply."""
    everyone = list(workers)
    for worker in everyone:
        worker.send(kind, **fields)
    return [worker.reply() for worker in everyone]


def receive_any(workers: Iterable[Worker], timeout_s: float) -> tuple[Worker, Message]:
    """Returns the next message of any of them."""
    everyone = {worker.channel.fileno(): worker for worker in workers}
    ready = connection.wait(everyone, timeout_s)
    if not ready:
        names = " and ".join(worker.role for worker in everyone.values())
        raise BenchError(f"{names} sent nothing for {timeout_s:g} s")
    worker = next(worker for number, worker in everyone.items() if number in ready)
    return worker, worker.reply(timeout_s)


async def serve(end: End) -> None:
    """Runs commands in a worker, one after the other, until the coordinator closes the channel.

    An exception of a command is told to the coordinator and ends this process.
    """
    while True:
        try:
            command = await end.coordinator.receive_async()
        except BenchError:
            return
        reply = operator.attrgetter(command.pop("kind"))(end)(**command)
        end.coordinator.send("reply", **((await reply if inspect.isawaitable(reply) else reply) or {}))


def main() -> None:
    """Serves to the end; exits with 1 where something failed, of which the coordinator is told.

    Of the one argument, JSON, ``end`` names the class that is served, ``fields`` are its options,
    ``channels`` the numbers of inherited sockets: to the coordinator, then to other workers.
    """
    # Ctrl-C goes to the whole group; the coordinator ends its workers in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    told = json.loads(sys.argv[1])
    coordinator, *peers = (
        Channel(socket.socket(fileno=number), "peer" if place else "coordinator")
        for place, number in enumerate(told["channels"])
    )
    try:
        asyncio.run(_serve(told["end"], told["fields"], coordinator, peers))
    except Exception as error:
        first: BaseException = error
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        try:
            coordinator.send_error(first)
        except BenchError:
            pass  # it is gone, and with it the one who asked
        sys.exit(1)


async def _serve(named: str, fields: dict[str, object], coordinator: Channel, peers: list[Channel]) -> None:
    module, _, name = named.partition(":")
    end: End = getattr(importlib.import_module(f"kvxfer.bench.{module}"), name)(fields, coordinator, peers)
    try:
        await serve(end)
    finally:
        await end.aclose()


if __name__ == "__main__":
    main()
