"""A small router before prefill and decode engines, for tests and demonstrations.

``kvxfer bench router --prefill URL --decode URL --port N``, either URL any number of times.

It speaks the protocol that vLLM's connectors and the community's routers have settled on: a request
goes to a prefill engine for one token, and with the ``kv_transfer_params`` of that answer, as they are,
to a decode engine, whose answer is the client's. With ``--dispatch concurrent`` both are asked at once,
and kvxfer's prefill pushes: see `concurrent` for what a router has to know. In production one of those
routers (llm-d's, Dynamo's, vLLM's own) stands here: they know of load, prefixes and failures; this
one takes engines in turn and says what went wrong.

A URL that ends with ``#1`` is data-parallel rank 1 of its server. Each rank is an engine of its own, and
who pushes has to know which one it asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import secrets
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from kvxfer.bench.engines.options import RouterOptions

Body = Mapping[str, Any]

_log = logging.getLogger("kvxfer.bench.engines.router")

# What a prefill engine is asked for: its connector is to keep the pages and to say where they are.
_TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
# Below the 5 s after which vLLM's server closes an idle connection: one that it is about to close is
# not to be used again.
_KEEP_ALIVE_S = 2.0
_CONNECT_TIMEOUT_S = 5.0
_STATUS_OF_A_CLIENT_THAT_LEFT = 499


class RouteError(Exception):
    """A request cannot be served; ``status`` and the message are for the client."""

    def __init__(self, status: int, message: str, backend: Backend | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.backend = backend

    def body(self) -> dict[str, Any]:
        """Returns the error as OpenAI's interface has it, and which engine it is about."""
        error: dict[str, Any] = {"message": str(self), "type": "router_error", "code": self.status}
        if self.backend is not None:
            error |= {"type": f"{self.backend.role}_error", "backend": self.backend.url}
        return {"error": error}


@dataclass(frozen=True)
class Backend:
    """An engine's server, or one data-parallel rank of it; ``role`` is ``prefill`` or ``decode``."""

    role: str
    url: str
    client: httpx.AsyncClient
    data_parallel_rank: str = ""

    @classmethod
    def parse(cls, role: str, url: str, client: httpx.AsyncClient) -> Backend:
        """Returns the engine of an address such as ``http://10.0.0.7:8000`` or ``http://10.0.0.7:8000#1``."""
        url, _, rank = url.partition("#")
        return cls(role, url.rstrip("/"), client, rank)

    async def ask(self, path: str, body: Body, headers: Mapping[str, str]) -> httpx.Response:
        """Sends a request and returns the answer with its body unread; the caller closes it."""
        if self.data_parallel_rank:
            headers = {**headers, "X-data-parallel-rank": self.data_parallel_rank}
        request = self.client.build_request("POST", self.url + path, json=body, headers=headers)
        try:
            answer = await self.client.send(request, stream=True)
            if not answer.is_success:
                async with contextlib.aclosing(answer):
                    reason = (await answer.aread()).decode(errors="replace")
                # What the client did wrong stays the client's; what the engine did is a gateway's.
                status = answer.status_code if answer.is_client_error else 502
                raise RouteError(status, f"{self} answered {answer.status_code}: {reason}", self)
        except httpx.TransportError as error:
            raise self.failed(error) from error
        return answer

    def failed(self, error: httpx.TransportError) -> RouteError:
        """Returns what the client is told when the engine cannot be reached, or falls silent."""
        status = 504 if isinstance(error, httpx.TimeoutException) else 502
        return RouteError(status, f"{self} failed: {type(error).__name__}: {error}", self)

    def __str__(self) -> str:
        rank = self.data_parallel_rank and f"#{self.data_parallel_rank}"
        return f"{self.role} {self.url}{rank}"


@dataclass
class Backends:
    """The engines, taken in turn."""

    prefills: Sequence[Backend]
    decodes: Sequence[Backend]
    #: Where the agents of a prefill engine are, as its last answer told.
    ranks: dict[Backend, Any] = field(default_factory=dict)
    _turns: dict[str, itertools.cycle[Backend]] = field(init=False)

    def __post_init__(self) -> None:
        self._turns = {"prefill": itertools.cycle(self.prefills), "decode": itertools.cycle(self.decodes)}

    def next(self, role: str) -> Backend:
        """Returns the engine whose turn it is."""
        return next(self._turns[role])


#: Serves one request: (engines, path, body, headers) -> the decode engine and its answer, unread.
Dispatch = Callable[[Backends, str, Body, Mapping[str, str]], Awaitable[tuple[Backend, httpx.Response]]]


async def sequential(
    backends: Backends, path: str, body: Body, headers: Mapping[str, str]
) -> tuple[Backend, httpx.Response]:
    """Asks decode when prefill has ended: decode pulls the pages."""
    return await _in_turn(backends, backends.next("prefill"), path, body, headers)


async def concurrent(
    backends: Backends, path: str, body: Body, headers: Mapping[str, str]
) -> tuple[Backend, httpx.Response]:
    """Asks both at once: prefill pushes the pages while it computes them.

    Both are told a key that is drawn for this request alone, and decode where prefill's agents are.
    Every answer of prefill tells that, so the first request to an engine goes in turn.
    """
    prefill = backends.next("prefill")
    ranks = backends.ranks.get(prefill)
    if ranks is None:
        return await _in_turn(backends, prefill, path, body, headers)
    own = {"version": 1, "push": secrets.token_hex(16)}
    decode = backends.next("decode")
    params = {"do_remote_prefill": True, "do_remote_decode": False, "kvxfer": {**own, "ranks": ranks}}
    tasks = (
        asyncio.create_task(_prefilled(backends, prefill, path, body, headers, kvxfer=own)),
        asyncio.create_task(decode.ask(path, {**body, "kv_transfer_params": params}, headers)),
    )
    try:
        # When one fails the other need not go on.
        await asyncio.gather(*tasks)
        return decode, tasks[1].result()
    except BaseException:
        # It may have restarted: what it says next time is believed again.
        backends.ranks.pop(prefill, None)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        if not tasks[1].cancelled() and tasks[1].exception() is None:
            await tasks[1].result().aclose()
        raise


DISPATCHES: Mapping[str, Dispatch] = {"sequential": sequential, "concurrent": concurrent}


async def _in_turn(
    backends: Backends, prefill: Backend, path: str, body: Body, headers: Mapping[str, str]
) -> tuple[Backend, httpx.Response]:
    handed_over = await _prefilled(backends, prefill, path, body, headers)
    if not handed_over:
        _log.warning("%s handed nothing over for %s; decode computes it", prefill, headers["X-Request-Id"])
    decode = backends.next("decode")
    return decode, await decode.ask(path, {**body, "kv_transfer_params": handed_over or None}, headers)


async def _prefilled(
    backends: Backends, prefill: Backend, path: str, body: Body, headers: Mapping[str, str], **params: Any
) -> dict[str, Any] | None:
    """Returns what prefill says for decode, when it has ended."""
    answer = await prefill.ask(path, prefill_body(body, **params), headers)
    try:
        async with contextlib.aclosing(answer):
            told: dict[str, Any] | None = json.loads(await answer.aread()).get("kv_transfer_params")
    except httpx.TransportError as error:
        raise prefill.failed(error) from error
    except (ValueError, AttributeError) as error:
        raise RouteError(502, f"{prefill} answered what is no JSON object: {error}", prefill) from error
    own = (told or {}).get("kvxfer")
    if isinstance(own, dict) and "ranks" in own:
        backends.ranks[prefill] = own["ranks"]
    return told


def prefill_body(body: Body, **params: Any) -> dict[str, Any]:
    """Returns a client's request as a prefill engine gets it: one token, at once, and keep the pages."""
    asked = {**body, "stream": False, "max_tokens": 1, "n": 1, "kv_transfer_params": _TO_PREFILL | params}
    if "max_completion_tokens" in body:
        asked["max_completion_tokens"] = 1
    # Neither fits an answer of one token in one piece.
    for name in ("stream_options", "min_tokens", "best_of"):
        asked.pop(name, None)
    return asked


def create_app(
    prefills: Sequence[str],
    decodes: Sequence[str],
    *,
    dispatch: str = "sequential",
    silence_timeout_s: float = 300.0,
) -> FastAPI:
    """Returns the router as an ASGI application.

    Parameters
    ----------
    prefills, decodes
        Addresses of engines, such as ``http://10.0.0.7:8000``, or of a data-parallel rank of one,
        ``http://10.0.0.7:8000#1``; at least one of each.
    dispatch
        One of ``DISPATCHES``.
    silence_timeout_s
        How long an engine may say nothing before it counts as failed.
    """
    client = httpx.AsyncClient(
        timeout=httpx.Timeout(silence_timeout_s, connect=_CONNECT_TIMEOUT_S, pool=None),
        limits=httpx.Limits(keepalive_expiry=_KEEP_ALIVE_S),
    )
    backends = Backends(
        [Backend.parse("prefill", url, client) for url in prefills],
        [Backend.parse("decode", url, client) for url in decodes],
    )
    serve = DISPATCHES[dispatch]

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with client:
            yield

    app = FastAPI(title="kvxfer bench router", lifespan=lifespan)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/v1/models")
    async def models() -> Response:
        decode = backends.next("decode")
        try:
            answer = await client.get(f"{decode.url}/v1/models")
        except httpx.TransportError as error:
            return _error(decode.failed(error))
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def route(request: Request) -> Response:
        headers = {"X-Request-Id": request.headers.get("X-Request-Id") or uuid.uuid4().hex}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        try:
            body = _checked(await request.body())
            served = await _while_client_waits(request, serve(backends, request.url.path, body, headers))
        except RouteError as error:
            _log.warning("request %s: %s", headers["X-Request-Id"], error)
            return _error(error)
        if served is None:
            return Response(status_code=_STATUS_OF_A_CLIENT_THAT_LEFT)
        decode, answer = served
        return StreamingResponse(
            _passed_on(decode, answer),
            media_type=answer.headers.get("content-type"),
            headers={"X-Request-Id": headers["X-Request-Id"]},
        )

    return app


async def _passed_on(decode: Backend, answer: httpx.Response) -> AsyncIterator[bytes]:
    """Yields an answer as it comes; when the client leaves, this ends and closes it, and so does decode."""
    async with contextlib.aclosing(answer):
        try:
            async for piece in answer.aiter_bytes():
                yield piece
        except httpx.TransportError as error:
            failure = decode.failed(error)
            _log.warning("%s", failure)
            # The status is with the client already: in a stream of events the failure is one of them,
            # elsewhere only the missing end tells.
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                raise
            yield f"data: {json.dumps(failure.body())}\n\n".encode()


async def _while_client_waits(
    request: Request, work: Awaitable[tuple[Backend, httpx.Response]]
) -> tuple[Backend, httpx.Response] | None:
    """Runs ``work`` to its end, or cancels it when the client disconnects and returns ``None``."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_client_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, leaving):
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))


async def _client_left(request: Request) -> None:
    # The body has been read: what is left to receive is the end.
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _checked(content: bytes) -> dict[str, Any]:
    """Returns the body of a request, or raises when it cannot be handed over."""
    try:
        body = json.loads(content)
    except ValueError as error:
        raise RouteError(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RouteError(400, f"the body is a JSON {type(body).__name__}; it is to be an object")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        # An answer carries the parameters of one prompt: the others' pages would be forgotten.
        raise RouteError(400, f"{len(prompt)} prompts in one request; send a request for each")
    return body


def _error(error: RouteError) -> JSONResponse:
    return JSONResponse(error.body(), error.status)


def run(options: RouterOptions) -> int:
    """Runs the router until it is told to end."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    app = create_app(
        options.prefill,
        options.decode,
        dispatch=options.dispatch,
        silence_timeout_s=options.silence_timeout_s,
    )
    with socket.create_server((options.host, options.port)) as listener:
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)
        uvicorn.Server(config).run(sockets=[listener])
    return 0
