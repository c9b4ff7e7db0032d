"""Every error as application/problem+json."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from kvxfer.control.agents.agent_errors import AgentGone, CallRefused
from kvxfer.control.schema.problems import TITLES, Refusal
from kvxfer.errors import KvxferError
from kvxfer.log import logger

if TYPE_CHECKING:
    from starlette.types import ExceptionHandler

MEDIA_TYPE: Final = "application/problem+json"
_OF_STATUS: Final = {400: "invalid-argument", 404: "not-found", 405: "method-not-allowed", 413: "too-large"}
# How many faults of a body are named.
_MOST_FAULTS: Final = 4
_MOST_CHARACTERS: Final = 2000


def problem(refusal: Refusal, path: str, headers: dict[str, str] | None = None) -> Response:
    """Returns the answer to a request that is refused."""
    status = refusal.status
    shown = {
        "type": f"urn:kvxfer:problem:{refusal.code}",
        "title": TITLES.get(status, "It failed"),
        "status": status,
        "detail": refusal.detail[:_MOST_CHARACTERS],
        "code": refusal.code,
        "instance": path,
    }
    headers = dict(headers or {})
    if refusal.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(refusal.retry_after_s)))
    if status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="kvxfer"'
    # ASCII, because a request may contain lone surrogates, which UTF-8 cannot encode.
    return Response(json.dumps(shown).encode(), status, headers, MEDIA_TYPE)


def as_refusal(error: Exception) -> Refusal:
    """Returns the refusal that answers an exception."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, CallRefused):
        return _of_agent(error.code, error.words)
    if isinstance(error, AgentGone):
        return Refusal("gone", f"{error}: the request may or may not have been carried out")
    if isinstance(error, TimeoutError):
        return Refusal("deadline", f"no answer in time: the request may still be carried out{_and(error)}")
    if isinstance(error, KvxferError):
        return _of_agent(error.code, str(error))
    if isinstance(error, HTTPException):
        return Refusal(_OF_STATUS.get(error.status_code, "internal"), str(error.detail))
    logger().error("a request failed because of an error in the daemon", exc_info=error)
    return Refusal("internal", f"{type(error).__name__}: see the daemon's log")


def _of_agent(code: str, words: str) -> Refusal:
    """Returns the refusal for an agent's error. The request was valid, but does not fit the agent's state."""
    return Refusal(code, words, status=409 if code == "invalid-argument" else None)


def add_problems(app: FastAPI) -> None:
    """Makes the application answer all exceptions as problems."""

    async def refused(request: Request, error: Exception) -> Response:
        return problem(as_refusal(error), request.url.path)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return problem(Refusal("invalid-argument", _faults(error)), request.url.path)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = _OF_STATUS.get(error.status_code, "internal")
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = ", ".join(sorted(_methods(app, request.url.path)))
        words = {
            404: f"there is nothing at {request.url.path}",
            405: f"{request.method} is not a method of {request.url.path}",
        }.get(error.status_code, str(error.detail))
        return problem(Refusal(code, words), request.url.path, headers)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=400)  # the client has disconnected

    handlers: dict[type[Exception], ExceptionHandler] = {
        ClientDisconnect: gone,
        RequestValidationError: invalid,
        HTTPException: http,
        Refusal: refused,
        CallRefused: refused,
        AgentGone: refused,
        TimeoutError: refused,
        KvxferError: refused,
        Exception: refused,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


def _methods(app: FastAPI, path: str) -> set[str]:
    """Returns the methods of all routes of a path."""
    found: set[str] = set()
    for route in app.router.routes:
        if isinstance(route, Route) and route.path_regex.match(path):
            found |= route.methods or set()
    return found


def _faults(error: RequestValidationError) -> str:
    faults: list[Any] = list(error.errors())
    words = [
        f"{'.'.join(str(part) for part in fault.get('loc', ()))}: {fault.get('msg', 'is wrong')}"
        for fault in faults[:_MOST_FAULTS]
    ]
    if len(faults) > _MOST_FAULTS:
        words.append(f"and {len(faults) - _MOST_FAULTS} more")
    return "; ".join(words)


def _and(error: Exception) -> str:
    return f" ({error})" if str(error) else ""
