"""Checks before every route: the origin of a request, its sender, and the sender's limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect

from kvxfer.control.app.problem_answers import problem
from kvxfer.control.daemon.durable_tokens import DurableTokens
from kvxfer.control.http.http_protocol import MOST_CONNECTIONS
from kvxfer.control.schema.client_certificate import ClientCertificate
from kvxfer.control.schema.problems import Refusal
from kvxfer.control.state.descriptors import at_most
from kvxfer.control.state.rates import OpenCounts, Rates
from kvxfer.control.state.tokens import Caller

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

# One caller's running requests may hold this fraction of both listeners' connections.
_SHARE_OF_EACH: Final = 8
#: The largest body of a request: 65,536 block ids for each end.
MAX_BODY_NBYTES: Final = 2 * 1024 * 1024
# A body that does not arrive holds memory and a connection.
_BODY_TIMEOUT_S: Final = 30.0
# How much of a refused request's body is read and dropped, and for how long.
_PASSED_OVER_NBYTES: Final = 256 * 1024
_PASSED_OVER_TIMEOUT_S: Final = 2.0
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_OPEN: Final = frozenset({"/healthz", "/readyz", "/v1/openapi.json"})


class Guard:
    """ASGI middleware that admits or refuses requests.

    Parameters
    ----------
    hosts
        Host names and addresses of requests over TCP that it accepts, besides loopback's.
    uids
        Users that are admins over the unix socket.
    rate, burst
        Limit of each caller: requests a second, and requests at once.
    """

    def __init__(
        self,
        app: ASGIApp,
        tokens: DurableTokens,
        hosts: Collection[str],
        uids: Collection[int],
        rate: float = 500.0,
        burst: float = 1000.0,
    ) -> None:
        self._app = app
        self._tokens = tokens
        self._hosts = _LOOPBACK | {host.lower() for host in hosts}
        self._uids = frozenset(uids)
        self._rates = Rates(rate, burst)
        most = 2 * at_most(MOST_CONNECTIONS)
        self._most_each = most // _SHARE_OF_EACH
        self._under_way = OpenCounts(self._most_each, most)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        has_ended = False

        async def sending(message: Message) -> None:
            nonlocal has_ended
            has_ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        try:
            receive = self._let_in(scope, receive)
            key = _key(scope["kvxfer.caller"], scope)
            if not self._under_way.enter(key):
                raise Refusal("exhausted", f"{self._most_each} requests of one caller are under way")
        except Refusal as refusal:
            await _pass_over(scope, receive)
            await problem(refusal, scope["path"], {"Connection": "close"})(scope, receive, sending)
            return
        try:
            await self._app(scope, receive, sending)
        except ClientDisconnect:
            return
        except Exception:
            # The error was answered and logged. If the answer broke off midway, raising ends the connection.
            if not has_ended:
                raise
        finally:
            self._under_way.leave(key)

    def _let_in(self, scope: Scope, receive: Receive) -> Receive:
        """Finds the caller, and returns a `receive` with bounds for the body; or refuses the request."""
        headers = _headers(scope)
        uid = scope.get("kvxfer.uid")
        if uid is None:
            self._require_own_origin(scope, headers)
        certificate = scope.get("kvxfer.certificate")
        caller = self._caller(headers, uid, certificate)
        if wait_s := self._rates.take(_key(caller, scope), time.monotonic()):
            raise Refusal("rate-limited", "too many requests a second", retry_after_s=wait_s)
        if caller is None and not _is_open(scope):
            raise Refusal("unauthorized", _why(headers, certificate))
        scope["kvxfer.caller"] = caller
        return _bounded(receive, headers)

    def _require_own_origin(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Refuses requests that another site made a browser send, and names that are not this daemon's."""
        host = headers.get(b"host", b"").decode("latin-1")
        if _host_of(host) not in self._hosts:
            raise Refusal("forbidden", f"{host!r} is not a name of this daemon: add it with --host-name")
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").lower() != f"{scope['scheme']}://{host.lower()}":
            raise Refusal("forbidden", "requests from other origins are not answered")
        if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            raise Refusal("forbidden", "requests from other sites are not answered")

    def _caller(
        self, headers: dict[bytes, bytes], uid: int | None, certificate: ClientCertificate | None
    ) -> Caller | None:
        given = headers.get(b"authorization")
        if given is not None:
            kind, _, secret = given.decode("latin-1").partition(" ")
            return self._tokens.of_secret(secret.strip()) if kind.lower() == "bearer" else None
        if uid is not None and uid in self._uids:
            return Caller(f"uid:{uid}", f"uid {uid}", "admin")
        return None if certificate is None else self._tokens.of_certificate(certificate)


_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"cache-control", b"no-store"),
)


def _is_open(scope: Scope) -> bool:
    """Whether a request needs no token: health, the API's description, and the page's files."""
    path: str = scope["path"]
    return scope["method"] in ("GET", "HEAD") and (path in _OPEN or not path.startswith(("/v1/", "/metrics")))


def _headers(scope: Scope) -> dict[bytes, bytes]:
    """Returns the headers; refuses a request that repeats one of the headers that decide something."""
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name in found and name in (
            b"host",
            b"origin",
            b"authorization",
            b"content-length",
            b"idempotency-key",
        ):
            raise Refusal("invalid-argument", f"header {name.decode('latin-1')} is sent twice")
        found[name] = value
    if b"transfer-encoding" in found and b"content-length" in found:
        raise Refusal("invalid-argument", "a body has either a length or chunks, not both")
    return found


def _host_of(host: str) -> str:
    """Returns the name in a Host header, without brackets and port; ``""`` if it has none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _key(caller: Caller | None, scope: Scope) -> str:
    if caller is not None:
        return caller.key
    client = scope.get("client")
    return f"from:{client[0] if client else 'socket'}"


def _why(headers: dict[bytes, bytes], certificate: ClientCertificate | None) -> str:
    if b"authorization" in headers:
        return "this token is not valid: wrong, expired or revoked"
    if certificate is not None:
        names = ", ".join([*sorted(certificate.names)[:4], f"SHA256:{certificate.digest}"])
        return (
            f"this daemon does not have exactly one valid token for this certificate ({names}): ask an "
            "admin to make one for its name, or send a token"
        )
    return "send a token: Authorization: Bearer ..."


async def _pass_over(scope: Scope, receive: Receive) -> None:
    """Reads and drops the body of a refused request; meanwhile a new connection may replace this one.

    Closing a connection with unread bytes resets it, and the client might then lose the answer.
    """
    if (yield_place := scope.get("kvxfer.yield_place")) is not None:
        yield_place()
    nbytes = 0
    try:
        async with asyncio.timeout(_PASSED_OVER_TIMEOUT_S):
            while nbytes < _PASSED_OVER_NBYTES:
                message: Any = await receive()
                nbytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _bounded(receive: Receive, headers: dict[bytes, bytes]) -> Receive:
    """Returns a `receive` that bounds a body's size, and the time in which it has to arrive."""
    told = headers.get(b"content-length", b"0")
    if not told.isdigit() or int(told) > MAX_BODY_NBYTES:
        raise Refusal("too-large", f"a body has {MAX_BODY_NBYTES} bytes at most")
    nbytes = 0
    deadline: float | None = None
    is_whole = False

    async def receiving() -> Message:
        nonlocal nbytes, deadline, is_whole
        if is_whole:
            return await receive()
        now = asyncio.get_running_loop().time()
        deadline = now + _BODY_TIMEOUT_S if deadline is None else deadline
        try:
            message: Any = await asyncio.wait_for(receive(), deadline - now)
        except TimeoutError:
            raise Refusal("deadline", "the body did not arrive in time") from None
        nbytes += len(message.get("body", b""))
        if nbytes > MAX_BODY_NBYTES:
            raise Refusal("too-large", f"a body has {MAX_BODY_NBYTES} bytes at most")
        is_whole = not message.get("more_body", False)
        return message  # type: ignore[no-any-return]

    return receiving
