"""A stream of JSON objects between two processes of one benchmark; descriptors may travel along."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import deque
from typing import Any

from kvxfer.bench.errors import BenchError, CheckFailedError

Message = dict[str, Any]

_CHUNK_NBYTES = 1 << 16
_MAX_DESCRIPTORS = 8


class Channel:
    """One end. Every object has a ``kind``; ``"error"`` is raised where it is received.

    The coordinator uses the blocking calls, workers ``receive_async``; one end uses one of them.
    """

    def __init__(self, stream: socket.socket, peer: str) -> None:
        self._stream = stream
        self._peer = peer
        self._buffer = bytearray()
        #: Descriptors that came with the messages received so far, in order. Taken out by their user.
        self.descriptors: deque[int] = deque()

    def fileno(self) -> int:
        return self._stream.fileno()

    def close(self) -> None:
        self._stream.close()

    def send(self, kind: str, descriptors: tuple[int, ...] = (), **fields: Any) -> None:
        """Sends one object; blocks while the peer does not read."""
        data = json.dumps({"kind": kind, **fields}).encode() + b"\n"
        self._stream.settimeout(None)
        try:
            if descriptors:
                # They travel with the first byte.
                socket.send_fds(self._stream, [data[:1]], list(descriptors))
                data = data[1:]
            self._stream.sendall(data)
        except OSError as error:
            raise BenchError(f"the {self._peer} process is gone: {error.strerror}") from error

    def receive(self, timeout_s: float) -> Message:
        """Returns the next object; raises when the peer is gone, silent for ``timeout_s`` or failed."""
        deadline = time.monotonic() + timeout_s
        while (message := self.received()) is None:
            self._stream.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                self._read()
            except TimeoutError:
                raise BenchError(f"the {self._peer} process said nothing for {timeout_s:g} s") from None
        return message

    async def receive_async(self) -> Message:
        """Returns the next object, however long it takes."""
        loop = asyncio.get_running_loop()
        while (message := self.received()) is None:
            readable = loop.create_future()
            loop.add_reader(self.fileno(), _set_once, readable)
            try:
                await readable
            finally:
                loop.remove_reader(self.fileno())
            self._read()
        return message

    def received(self) -> Message | None:
        """Returns the next object that is here in full, without reading."""
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            return None
        self._buffer = rest
        message: Message = json.loads(line)
        if message["kind"] == "error":
            error = CheckFailedError if message["check_failed"] else BenchError
            raise error(f"{self._peer}: {message['message']}")
        return message

    def send_error(self, error: BaseException) -> None:
        """Tells the peer why this end stops."""
        text = str(error) if isinstance(error, BenchError) else f"{type(error).__name__}: {error}"
        self.send("error", message=text, check_failed=isinstance(error, CheckFailedError))

    def _read(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._stream, _CHUNK_NBYTES, _MAX_DESCRIPTORS)
        except TimeoutError:
            raise
        except OSError as error:
            raise BenchError(f"the {self._peer} process is gone: {error.strerror}") from error
        if not data:
            raise BenchError(f"the {self._peer} process ended early")
        self._buffer += data
        self.descriptors.extend(descriptors)


def _set_once(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
