"""The agent's end of one connection to the daemon: sending never blocks, and queues are bounded."""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvxfer.daemon_link.frames import FrameKind, FrameReader, Malformed, frame, json_frame, message_of

# Queue limit for answers, if the daemon sends requests but does not read. Records and state stop at the other
# limit.
_MOST_QUEUED_NBYTES: Final = 4 << 20
_ROOM_NBYTES: Final = 256 << 10
_RECEIVED_NBYTES: Final = 64 << 10
_UCRED: Final = struct.Struct("3i")


def dial(path: Path) -> Connection:
    """Returns a connection to the daemon that listens at `path`. Does not block.

    Raises
    ------
    PermissionError
        The listening process belongs to a user other than this one or root.
    OSError
        No process listens there, or the system has no socket left.
    """
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        try:
            connected.connect(os.fspath(path))
        except OSError as error:  # also EAGAIN: the backlog of a hanging daemon is full
            raise ConnectionError(f"nobody answers at {path}: {error.strerror}") from None
        # The credentials of the process that called listen(). The socket file's owner proves nothing if other
        # users may write to the folder.
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        _, uid, _ = _UCRED.unpack(credentials)
        if uid not in (0, os.geteuid()):
            raise PermissionError(
                f"the daemon at {path} is of user {uid}, and this agent of user {os.geteuid()}: only its own "
                "user's or root's is obeyed"
            )
    except BaseException:
        connected.close()
        raise
    return Connection(connected)


class Connection:
    """Frames over one socket, for one thread that polls it.

    Attributes
    ----------
    has_queued
        Whether bytes are queued for the daemon; if so, poll for writing.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._reader = FrameReader()
        self._queued: deque[memoryview] = deque()
        self._queued_nbytes = 0
        self.fd = connected.fileno()

    @property
    def has_queued(self) -> bool:
        return bool(self._queued)

    @property
    def has_room(self) -> bool:
        """Whether the daemon reads fast enough to be sent more that it did not request."""
        return self._queued_nbytes < _ROOM_NBYTES

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a JSON object, now or when the daemon reads again.

        Raises
        ------
        OSError
            The connection is over, or the daemon sends requests without reading the answers.
        ValueError
            It is longer than a frame may be; it was not sent.
        """
        self._put(json_frame(message))

    def send_records(self, records: bytes) -> None:
        """Sends whole records in the same way."""
        self._put(frame(FrameKind.RECORDS, records))

    def flush(self) -> None:
        """Sends as many queued bytes as the daemon takes.

        Raises
        ------
        OSError
            The connection is over.
        """
        while self._queued:
            first = self._queued[0]
            try:
                sent = self._socket.send(first)
            except BlockingIOError:
                return
            self._queued_nbytes -= sent
            if sent == len(first):
                self._queued.popleft()
            else:
                self._queued[0] = first[sent:]

    def receive(self) -> list[dict[str, Any]]:
        """Returns the daemon's messages; call it when the socket is readable.

        Raises
        ------
        Malformed
            The daemon sent an invalid message.
        OSError
            The connection is over.
        """
        try:
            data = self._socket.recv(_RECEIVED_NBYTES)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError("the daemon has ended the connection")
        messages = []
        for kind, payload in self._reader.feed(data):
            if kind is not FrameKind.JSON:
                raise Malformed("the daemon sent records, which it has none of")
            messages.append(message_of(payload))
        return messages

    def close(self) -> None:
        """Ends the connection, and drops queued bytes. Idempotent, also in the child of a fork."""
        self._socket.close()
        self._queued.clear()

    def _put(self, data: bytes) -> None:
        if self._queued_nbytes + len(data) > _MOST_QUEUED_NBYTES:
            raise ConnectionAbortedError(
                f"the daemon has not read {self._queued_nbytes} bytes, and asks for more"
            )
        self._queued.append(memoryview(data))
        self._queued_nbytes += len(data)
        self.flush()
