"""A stream of messages between two processes of one benchmark; descriptors may travel along."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from kvxfer.bench.errors import BenchError, CheckFailedError

Message = dict[str, Any]


class Channel:
    """One end. Every message has a ``kind``; ``"error"`` is raised where it is received.

    The coordinator uses the blocking calls, workers ``receive_async``; one end uses one of them.
    """

    def __init__(self, stream: socket.socket, peer: str) -> None:
        self._connection = Connection(stream.detach())
        self._peer = peer
        #: Descriptors that came with the messages received so far, in order. Taken out by their user.
        self.descriptors: deque[int] = deque()

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()

    def send(self, kind: str, descriptors: tuple[int, ...] = (), **fields: Any) -> None:
        """Sends one message; blocks while the peer does not read."""
        try:
            # As JSON: what a connection sends by itself is pickled.
            told = json.dumps([{"kind": kind, **fields}, len(descriptors)])
            self._connection.send_bytes(told.encode())
            for descriptor in descriptors:
                reduction.send_handle(self._connection, descriptor, 0)
        except OSError as error:
            raise BenchError(f"the {self._peer} process is gone: {error.strerror}") from error

    def receive(self, timeout_s: float) -> Message:
        """Returns the next message; raises when the peer is gone, silent for ``timeout_s`` or failed."""
        try:
            if not self._connection.poll(timeout_s):
                raise BenchError(f"the {self._peer} process sent nothing for {timeout_s:g} s")
            message, num_descriptors = json.loads(self._connection.recv_bytes())
            self.descriptors += [reduction.recv_handle(self._connection) for _ in range(num_descriptors)]
        except (EOFError, OSError) as error:
            raise BenchError(f"the {self._peer} process ended early") from error
        if message["kind"] == "error":
            kind = CheckFailedError if message["check_failed"] else BenchError
            raise kind(f"{self._peer}: {message['message']}")
        return dict(message)

    async def receive_async(self) -> Message:
        """Returns the next message, however long it takes until it begins to come."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self.fileno(), readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self.fileno())
        return self.receive(0.0)

    def send_error(self, error: BaseException) -> None:
        """Tells the peer why this end stops."""
        text = str(error) if isinstance(error, BenchError) else f"{type(error).__name__}: {error}"
        self.send("error", message=text, check_failed=isinstance(error, CheckFailedError))
