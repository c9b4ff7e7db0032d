"""Connections whose TLS handshake is not over yet: each has a place, as the others have, and may lose it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from kvxfer.control.http.http_protocol import REQUEST_TIMEOUT_S, BoundedProtocol, make_room

if TYPE_CHECKING:
    from kvxfer.control.http.http_protocol import State
    from kvxfer.control.http.rest_certificate import RestCertificate


def behind_tls(certificate: RestCertificate) -> type[asyncio.Protocol]:
    """Returns the protocol of a listener whose clients speak TLS."""
    return type("TlsHandshake", (_TlsHandshake,), {"_certificate": certificate})


class _TlsHandshake(asyncio.Protocol):
    """One connection, from its acceptance to the end of the handshake.

    asyncio's own servers tell nothing of a connection before that, so a client that stays silent would hold a
    descriptor that nothing counts.
    """

    _certificate: RestCertificate

    def __init__(
        self, server_state: State, _loop: asyncio.AbstractEventLoop | None = None, **more: Any
    ) -> None:
        self._state = server_state
        self._more = more
        self._loop = _loop or asyncio.get_event_loop()
        self._transport: Any = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accepts a connection; if there are too many, it replaces another."""
        self._transport = transport
        self._state.connections.add(self)  # type: ignore[arg-type]  # uvicorn only calls shutdown()
        if not make_room(self._state, self):
            return
        self._state.silent[self] = None
        self._transport.pause_reading()
        self._task = self._loop.create_task(self._let_in(), name="tls")

    def connection_lost(self, exc: Exception | None) -> None:
        """Gives up its place."""
        self._leave_place()

    def leave(self) -> None:
        """Ends the connection, because another needs its place."""
        self._leave_place()
        self._transport.abort()

    def shutdown(self) -> None:
        """Ends the connection, because the server ends."""
        self.leave()

    def _leave_place(self) -> None:
        self._state.connections.discard(self)
        self._state.silent.pop(self, None)

    async def _let_in(self) -> None:
        early = _Early()
        try:
            context = await self._certificate.context()
            if self._transport.is_closing():
                return
            secured = await self._loop.start_tls(
                self._transport,
                early,
                context,
                server_side=True,
                ssl_handshake_timeout=REQUEST_TIMEOUT_S,
                ssl_shutdown_timeout=REQUEST_TIMEOUT_S,
            )
        except Exception:
            # What arrived was no handshake, or no valid one, or not in time. A stranger may bring any of it
            # about, so nothing is logged.
            self._transport.abort()
            return
        finally:
            self._leave_place()
        if secured is None or early.is_lost:  # start_tls returns None if the connection was aborted meanwhile
            return
        protocol = BoundedProtocol(server_state=self._state, _loop=self._loop, **self._more)
        secured.set_protocol(protocol)
        protocol.connection_made(secured)
        if early.data and not secured.is_closing():
            protocol.data_received(bytes(early.data))


class _Early(asyncio.Protocol):
    """Keeps what arrives together with the handshake's end, before the connection's protocol is there."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.is_lost = False

    def data_received(self, data: bytes) -> None:
        """Keeps it."""
        self.data += data

    def connection_lost(self, exc: Exception | None) -> None:
        """Notes it."""
        self.is_lost = True
