"""Either end of the link by hand: it can send what a real end never sends, or nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from kvxfer.daemon_link.frames import VERSION, FrameKind, FrameReader, json_frame, message_of

BOUND_S = 30.0

HELLO: dict[str, Any] = {
    "t": "hello",
    "v": VERSION,
    "name": "raw",
    "incarnation": "0" * 32,
    "address": "tcp://127.0.0.1:1",
    "pid": 1,
    "host": "here",
    "version": "0",
    "may": ["show"],
    "options": {},
}


class RawEnd:
    """A blocking socket; for tests whose other end is on another thread or in another process."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.socket.settimeout(BOUND_S)
        self._reader = FrameReader()
        self._heard: list[tuple[FrameKind, bytes]] = []
        self.agent = ""  # whose connection it is, where a daemon has accepted it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def say(self, message: Mapping[str, Any] | bytes) -> None:
        self.socket.sendall(message if isinstance(message, bytes) else json_frame(message))

    def hear(self, *, records_too: bool = False) -> dict[str, Any]:
        """Returns the next message, or ``{"records": bytes}``; raises `EOFError` at the end."""
        while True:
            while self._heard:
                kind, payload = self._heard.pop(0)
                if kind is FrameKind.JSON:
                    return message_of(payload)
                if records_too:
                    return {"t": "records", "records": payload}
            try:
                data = self.socket.recv(65_536)
            except (BrokenPipeError, ConnectionResetError):
                data = b""
            if not data:
                raise EOFError
            self._heard += self._reader.feed(data)

    def hear_reply(self) -> dict[str, Any]:
        """Returns the next reply, and skips other messages."""
        while (message := self.hear())["t"] != "reply":
            pass
        return message

    def is_left(self) -> bool:
        """Whether the other end disconnects, whatever it sends before."""
        try:
            while True:
                self.hear()
        except EOFError:
            return True
        except TimeoutError:
            return False


class RawAgent(RawEnd):
    """An agent's end, connected to the daemon in a folder."""

    def __init__(self, folder: Path) -> None:
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(os.fspath(folder / "agents.sock"))
        super().__init__(connected)

    def greet(self, **changes: Any) -> None:
        self.say({**HELLO, **changes})
        assert self.hear()["t"] == "welcome"


class RawDaemon:
    """A socket on which agents call."""

    def __init__(self, folder: Path) -> None:
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.settimeout(BOUND_S)
        self._listening.bind(os.fspath(folder / "agents.sock"))
        self._listening.listen()
        self._ends: list[RawEnd] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()
        for end in self._ends:
            end.socket.close()

    def accept(self, *, is_welcome: bool = True) -> RawEnd:
        """Returns the connection of the next agent that calls, after its hello."""
        end = RawEnd(self._listening.accept()[0])
        self._ends.append(end)
        hello = end.hear()
        assert hello["t"] == "hello"
        end.agent = hello["name"]
        if is_welcome:
            end.say({"t": "welcome"})
        return end
