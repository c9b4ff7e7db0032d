"""A TCP proxy between two agents that cuts, delays, holds back and swallows their bytes.

Of the connections to one agent the first is the session's control connection, later ones are rails.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

_CHUNK_NBYTES: Final = 1 << 16


@dataclass
class Link:
    """One proxied connection.

    Attributes
    ----------
    sent
        The first 64 KiB from the dialling side, for tests that replay them.
    passed_nbytes
        Both ways together.
    cut_after_nbytes
        Both sides are cut when this many bytes have passed.
    answers
        Set unless bytes from the listening side are held back.
    """

    near: socket.socket
    far: socket.socket
    sent: bytearray = field(default_factory=bytearray)
    passed_nbytes: int = 0
    cut_after_nbytes: int = -1
    swallow: bool = False
    answers: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.answers.set()

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Holds back the bytes from the listening side; those from the dialling side pass."""
        self.answers.clear()
        try:
            yield
        finally:
            self.answers.set()

    def cut(self) -> None:
        """Ends it at both sides."""
        for end in (self.near, self.far):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # gone already

    def half_close(self) -> None:
        """Sends end of file to the listening side; its own bytes still pass."""
        self.far.shutdown(socket.SHUT_WR)


class Proxy:
    """Forwards connections to an agent's address."""

    def __init__(self, address: str, delay_s: float = 0.0) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._delay_s = delay_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.links: list[Link] = []
        self.flip_after_nbytes = -1  # a bit of what the listening side says, once
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def control(self) -> Link:
        return self.links[0]

    def blackhole(self) -> None:
        """Drops everything from now on, without an error at either side."""
        for link in self.links:
            link.swallow = True

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target, 30)
            except OSError:
                near.close()
                continue
            for end in (near, far):
                end.settimeout(None)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = Link(near, far)
            self.links.append(link)
            self._pump(link, near, far)
            self._pump(link, far, near)

    def _pump(self, link: Link, source: socket.socket, sink: socket.socket) -> None:
        late: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

        def receive() -> None:
            while True:
                try:
                    data = source.recv(_CHUNK_NBYTES)
                except OSError:
                    data = b""
                if source is link.near and len(link.sent) < _CHUNK_NBYTES:
                    link.sent += data
                if self._delay_s:
                    late.put((time.monotonic() + self._delay_s, data))
                else:
                    forward(data)
                if not data:
                    return

        def forward(data: bytes) -> None:
            if source is link.far:
                link.answers.wait()
            link.passed_nbytes += len(data)
            if 0 <= link.cut_after_nbytes < link.passed_nbytes:
                link.cut()
                return
            if link.swallow:
                return
            if data and source is link.far and 0 <= self.flip_after_nbytes < link.passed_nbytes:
                self.flip_after_nbytes = -1
                data = data[:-1] + bytes([data[-1] ^ 1])
            try:
                if data:
                    sink.sendall(data)
                else:
                    sink.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the reader of this direction notices

        def forward_late() -> None:
            while True:
                due, data = late.get()
                time.sleep(max(due - time.monotonic(), 0))
                forward(data)
                if not data:
                    return

        for body in (receive, forward_late) if self._delay_s else (receive,):
            self._threads.append(threading.Thread(target=body, daemon=True))
            self._threads[-1].start()

    def close(self) -> None:
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # nobody has dialled
        self._listener.close()
        for link in self.links:
            link.cut()
        for thread in self._threads:
            thread.join(5)
        for link in self.links:
            link.near.close()
            link.far.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
