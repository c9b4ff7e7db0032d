"""uvicorn's HTTP with limits of connections and times; it also identifies the client."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from typing import TYPE_CHECKING, Any, Final, Protocol

from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from kvxfer.control.schema.client_certificate import ClientCertificate
from kvxfer.control.state.descriptors import at_most

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

#: Connections of one listener, if there are enough descriptors. A further connection replaces one that has
#: nothing in progress: the oldest one without a request yet, or with a refused request; else the one that has
#: been idle for longest.
MOST_CONNECTIONS: Final = 1024
#: Connections that are accepted in one round of the loop, before they are counted; more wait in the kernel.
ACCEPTED_AT_ONCE: Final = 16
_BACKLOG: Final = 1024
#: For a connection's first request to arrive, with all of its headers; and for a TLS handshake before that.
REQUEST_TIMEOUT_S: Final = 10.0
# For a client to read something: until then an answer, or a stream's chunk, stays in memory.
_STALL_TIMEOUT_S: Final = 60.0
_CREDENTIALS: Final = struct.Struct("3i")


class _Known:
    """Adds to each request what is known about the other end of its connection."""

    def __init__(self, app: ASGIApp, **known: object) -> None:
        self._app = app
        self._known = {f"kvxfer.{name}": value for name, value in known.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.update(self._known)
        await self._app(scope, receive, send)


class Replaceable(Protocol):
    """A connection that another may replace."""

    def leave(self) -> None:
        """Ends the connection at once."""


class State(ServerState):
    """The state of one listener, with its connections that have nothing in progress, the oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.silent: dict[Replaceable, None] = {}
        self.resting: dict[Replaceable, None] = {}


def make_room(state: State, newcomer: Replaceable) -> bool:
    """Ends a connection if there is one too many; returns whether the newcomer may stay."""
    if len(state.connections) <= at_most(MOST_CONNECTIONS):
        return True
    loser = next(iter(state.silent or state.resting), newcomer)
    loser.leave()
    return loser is not newcomer


class BoundedProtocol(H11Protocol):
    """One connection."""

    server_state: State

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._patience: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._is_refused = False

    def connection_made(self, transport: Any) -> None:
        """Accepts a connection; if there are too many, it replaces another."""
        super().connection_made(transport)
        if not make_room(self.server_state, self):
            return
        self.server_state.silent[self] = None
        end: socket.socket | None = transport.get_extra_info("socket")
        if end is not None and end.family == socket.AF_UNIX:
            told = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            self.app = _Known(self.app, uid=_CREDENTIALS.unpack(told)[1])
        if (tls := transport.get_extra_info("ssl_object")) is not None and (found := _certificate_of(tls)):
            self.app = _Known(self.app, certificate=found)
        self.app = _Known(self.app, yield_place=self._yield_place)
        self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        """Receives bytes; those of an incomplete request do not extend its time."""
        if self._patience is None and self._is_idle():
            self._wait_for_request()
        super().data_received(data)
        if not self._is_idle():
            self._stop_waiting()
            if not self._is_refused:
                self._give_up_place()

    def on_response_complete(self) -> None:
        """Marks the connection as idle, unless its next request has already arrived."""
        super().on_response_complete()
        if not self._is_idle():
            return
        if not self.transport.is_closing():
            self.server_state.resting[self] = None
        elif not self.transport.get_write_buffer_size():
            self.server_state.silent[self] = None  # with TLS, it waits for the client's own farewell

    def leave(self) -> None:
        """Ends the connection, because another needs its place."""
        # Removed at once, because uvicorn would count it until the loop's next round.
        self.connections.discard(self)
        self._give_up_place()
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timers."""
        self._stop_waiting()
        self._give_up_place()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Starts to count how long the client reads nothing."""
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(_STALL_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Stops counting: the client reads again."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _yield_place(self) -> None:
        """Permits another connection to replace this one from now on; its request was refused."""
        self._is_refused = True
        if not self.transport.is_closing():
            self.server_state.silent[self] = None

    def _give_up_place(self) -> None:
        self.server_state.silent.pop(self, None)
        self.server_state.resting.pop(self, None)

    def _wait_for_request(self) -> None:
        self._patience = self.loop.call_later(REQUEST_TIMEOUT_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


def _certificate_of(tls: ssl.SSLObject) -> ClientCertificate | None:
    """Returns the client's certificate; None if the daemon asked for none."""
    encoded = tls.getpeercert(binary_form=True)
    return None if encoded is None else ClientCertificate.read(encoded, tls.getpeercert())


class QuietServer(Server):
    """A server that sleeps until a request arrives, and leaves signals to its owner."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.server_state = State()
        self._listener: socket.socket | None = None
        self._ended = asyncio.Event()

    async def main_loop(self) -> None:
        """Waits for `end`; uvicorn's own loop wakes ten times a second."""
        assert self._listener is not None
        self._listener.listen(_BACKLOG)  # asyncio sets the backlog to what it accepts at once
        await self.on_tick(0)
        await self._ended.wait()

    async def run_on(self, listener: socket.socket) -> None:
        """Serves on a socket until `end`."""
        self._listener = listener
        await self._serve([listener])

    def end(self) -> None:
        """Makes `run_on` finish the answers in progress, within its configuration's time, and return."""
        self.should_exit = True
        self._ended.set()
