"""uvicorn's HTTP, with bounds: how long a request may take to come, and an answer to go; and who is there."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from typing import TYPE_CHECKING, Any, Final

from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvxfer.control.state.client_certificate import ClientCertificate

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

#: Connections of one listener; further ones are closed at once.
MOST_CONNECTIONS: Final = 1024
# Until a connection's first request has come, with all of its headers.
_REQUEST_TIMEOUT_S: Final = 10.0
# A client that takes nothing for so long holds an answer, or a stream's chunk, in memory.
_STALL_TIMEOUT_S: Final = 60.0
_CREDENTIALS: Final = struct.Struct("3i")


class _Known:
    """An application whose requests say who is at the other end of the connection."""

    def __init__(self, app: ASGIApp, **known: object) -> None:
        self._app = app
        self._known = {f"kvxfer.{name}": value for name, value in known.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.update(self._known)
        await self._app(scope, receive, send)


class BoundedProtocol(H11Protocol):
    """One connection."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._patience: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Takes a connection, or ends it where there are too many."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
            return
        end: socket.socket | None = transport.get_extra_info("socket")
        if end is not None and end.family == socket.AF_UNIX:
            told = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            self.app = _Known(self.app, uid=_CREDENTIALS.unpack(told)[1])
        if (tls := transport.get_extra_info("ssl_object")) is not None and (found := _certificate_of(tls)):
            self.app = _Known(self.app, certificate=found)
        self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        """Takes bytes; those of a request that is not whole yet win no time."""
        if self._patience is None and self._is_idle():
            self._wait_for_request()
        super().data_received(data)
        if not self._is_idle():
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Lets go of timers."""
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Begins to count how long nothing is taken."""
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(_STALL_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Stops to."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_request(self) -> None:
        self._patience = self.loop.call_later(_REQUEST_TIMEOUT_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


def _certificate_of(tls: ssl.SSLObject) -> ClientCertificate | None:
    """Returns the certificate that the client has shown; None where it was asked for none."""
    encoded = tls.getpeercert(binary_form=True)
    return None if encoded is None else ClientCertificate.read(encoded, tls.getpeercert())


class QuietServer(Server):
    """A server that sleeps while nothing is asked for, and leaves signals to its owner."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._ended = asyncio.Event()

    async def main_loop(self) -> None:
        """Waits for `end`; uvicorn's own wakes ten times a second."""
        await self.on_tick(0)
        await self._ended.wait()

    async def run_on(self, listener: socket.socket) -> None:
        """Serves on a socket until `end`."""
        await self._serve([listener])

    def end(self) -> None:
        """Has it answer what is under way, for as long as its configuration says, and return."""
        self.should_exit = True
        self._ended.set()
