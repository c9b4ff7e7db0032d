"""The processes of a benchmark: a coordinator, and the workers that it commands."""

from __future__ import annotations

import inspect
import json
import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from kvxfer.bench.errors import BenchError
from kvxfer.bench.run.channel import Channel, Message

#: name of a command -> what runs it: takes the message's fields, returns the reply's.
Handlers = Mapping[str, Callable[..., Message | Awaitable[Message]]]

# A worker imports numpy and the engine and faults in its memory before its first reply.
REPLY_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 5.0
# A transfer that misses its deadline is to be told by its worker, not by that worker's silence.
MAX_TRANSFER_TIMEOUT_S = REPLY_TIMEOUT_S - 10.0


def check_timeout(timeout_s: float) -> None:
    """Raises when ``--timeout-s`` is nothing, or longer than a worker may be silent."""
    if not 0 < timeout_s <= MAX_TRANSFER_TIMEOUT_S:
        raise BenchError(
            f"--timeout-s is above 0 and at most {MAX_TRANSFER_TIMEOUT_S:g}, unlike {timeout_s:g}"
        )


class Worker:
    """A child process that serves commands; it ends with its channel, and is killed if it does not."""

    def __init__(self, role: str, options: Message, peers: Sequence[socket.socket] = ()) -> None:
        """Starts ``role`` (worker.py); ``peers`` are its ends of channels to other workers."""
        ours, theirs = socket.socketpair()
        passed = [theirs, *peers]
        numbers = [str(stream.fileno()) for stream in passed]
        with theirs:
            # The child imports what its parent imports: the same path, and nothing before it.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvxfer.bench.run.worker", role, json.dumps(options), *numbers],
                pass_fds=[stream.fileno() for stream in passed],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        self.role = role
        self.channel = Channel(ours, role)

    @property
    def pid(self) -> int:
        return self._process.pid

    def reply(self, timeout_s: float = REPLY_TIMEOUT_S) -> Message:
        """Waits for the reply to a command that was sent by ``channel.send``."""
        return self.channel.receive(timeout_s)

    def call(
        self, kind: str, descriptors: tuple[int, ...] = (), timeout_s: float = REPLY_TIMEOUT_S, **fields: Any
    ) -> Message:
        """Sends a command and waits for its reply."""
        self.channel.send(kind, descriptors, **fields)
        return self.channel.receive(timeout_s)

    def end(self) -> None:
        """Closes the channel and waits for the process. Idempotent."""
        self.channel.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def call_all(workers: Iterable[Worker], kind: str, **fields: Any) -> list[Message]:
    """Sends a command to all workers at once and waits for every reply."""
    everyone = list(workers)
    for worker in everyone:
        worker.channel.send(kind, **fields)
    return [worker.channel.receive(REPLY_TIMEOUT_S) for worker in everyone]


def receive_any(workers: Iterable[Worker], timeout_s: float) -> tuple[Worker, Message]:
    """Returns the next message of any of them."""
    everyone = list(workers)
    for worker in everyone:
        if (message := worker.channel.received()) is not None:
            return worker, message
    with selectors.DefaultSelector() as selector:
        for worker in everyone:
            selector.register(worker.channel, selectors.EVENT_READ, worker)
        ready = selector.select(timeout_s)
    if not ready:
        names = " and ".join(worker.role for worker in everyone)
        raise BenchError(f"{names} said nothing for {timeout_s:g} s")
    ready_worker: Worker = ready[0][0].data
    return ready_worker, ready_worker.channel.receive(timeout_s)


async def serve(channel: Channel, handlers: Handlers) -> None:
    """Runs commands in a worker, one after the other, until the coordinator closes the channel.

    An exception of a handler is told to the coordinator and ends this process.
    """
    while True:
        try:
            command = await channel.receive_async()
        except BenchError:
            return
        reply = handlers[command.pop("kind")](**command)
        channel.send("reply", **(await reply if inspect.isawaitable(reply) else reply))
