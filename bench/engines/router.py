"""A small router before prefill and decode engines, for tests and demonstrations.

It speaks the protocol that vLLM's connectors and the community's routers use. A request goes to a prefill
engine for one token. It then goes to a decode engine, with the unchanged ``kv_transfer_params`` of prefill's
answer, and the client gets decode's answer. Or the router asks both at once, and kvxfer's prefill pushes
(`Router.concurrent`). It takes engines in turn; those routers consider load, prefixes and failures.

A URL that ends with ``#1`` is data-parallel rank 1 of its server. Each rank is an engine of its own, and
a push needs to know which one is asked.
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
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Annotated, Any

import httpx
import uvicorn
from fastapi import Body, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from kvxfer.bench.engines.options import RouterOptions
from kvxfer.bench.engines.router_spans import RouterSpans

Fields = Mapping[str, Any]

_log = logging.getLogger("kvxfer.bench.engines.router")

#: Sent to a prefill engine: its connector keeps the pages and answers where they are.
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
# Below the 5 s after which vLLM's server closes an idle connection, so that the router never uses a
# connection that is about to be closed.
_KEEP_ALIVE_S = 2.0
_CONNECT_TIMEOUT_S = 5.0
_STATUS_OF_A_CLIENT_THAT_LEFT = 499


class RouteError(Exception):
    """A request cannot be served: ``status`` and ``body`` are what its client gets."""

    def __init__(self, status: int, message: str, engine: Engine | None = None) -> None:
        super().__init__(message)
        self.status = status
        about = {"type": "router_error"}
        if engine is not None:
            about = {"type": f"{engine.role}_error", "backend": engine.url}
        #: Errors in the form of OpenAI's interface.
        self.body = {"error": {"message": message, "code": status, **about}}


class Engine:
    """An engine's server, or one data-parallel rank of it; ``role`` is ``prefill`` or ``decode``."""

    def __init__(self, role: str, url: str, client: httpx.AsyncClient) -> None:
        address, _, self._rank = url.partition("#")
        self.role = role
        self.url = address.rstrip("/")
        self._name = f"{role} {url}"
        self._client = client
        #: The addresses of its agents, from its last answer.
        self.ranks: Any = None

    async def ask(self, path: str, body: Fields, headers: Mapping[str, str]) -> httpx.Response:
        """Sends a request and returns the answer with its body unread; the caller closes it."""
        if self._rank:
            headers = {**headers, "X-data-parallel-rank": self._rank}
        request = self._client.build_request("POST", self.url + path, json=body, headers=headers)
        try:
            answer = await self._client.send(request, stream=True)
            if answer.is_success:
                return answer
            async with contextlib.aclosing(answer):
                reason = (await answer.aread()).decode(errors="replace")
        except httpx.TransportError as error:
            raise self._failed(error) from error
        # A client's error keeps its status; an engine's error becomes a gateway's.
        status = answer.status_code if answer.is_client_error else 502
        raise RouteError(status, f"{self} answered {answer.status_code}: {reason}", self)

    async def prefill(self, path: str, body: Fields, headers: Mapping[str, str], **params: Any) -> Any:
        """Makes it compute one token of a request and keep the pages; returns its parameters for decode."""
        asked = {**body, "stream": False, "max_tokens": 1, "n": 1, "kv_transfer_params": TO_PREFILL | params}
        if "max_completion_tokens" in body:
            asked["max_completion_tokens"] = 1
        # These options do not fit an answer that is one token and does not stream.
        for name in ("stream_options", "min_tokens", "best_of"):
            asked.pop(name, None)
        answer = await self.ask(path, asked, headers)
        try:
            async with contextlib.aclosing(answer):
                told = json.loads(await answer.aread()).get("kv_transfer_params")
        except httpx.TransportError as error:
            raise self._failed(error) from error
        except (ValueError, AttributeError) as error:
            raise RouteError(502, f"the answer of {self} is not a JSON object: {error}", self) from error
        own = (told or {}).get("kvxfer")
        if isinstance(own, dict) and "ranks" in own:
            self.ranks = own["ranks"]
        return told

    def _failed(self, error: httpx.TransportError) -> RouteError:
        """Returns the client's error for an engine that cannot be reached, or falls silent."""
        status = 504 if isinstance(error, httpx.TimeoutException) else 502
        return RouteError(status, f"{self} failed: {type(error).__name__}: {error}", self)

    def __str__(self) -> str:
        return self._name


class Router:
    """Engines of both roles, taken in turn. Each way to ask returns decode's answer, unread."""

    def __init__(self, prefills: Sequence[Engine], decodes: Sequence[Engine]) -> None:
        self._prefills, self._decodes = itertools.cycle(prefills), itertools.cycle(decodes)

    async def sequential(self, path: str, body: Fields, headers: Mapping[str, str]) -> httpx.Response:
        """Asks decode when prefill has ended: decode pulls the pages."""
        return await self._in_turn(next(self._prefills), path, body, headers)

    async def concurrent(self, path: str, body: Fields, headers: Mapping[str, str]) -> httpx.Response:
        """Asks both at once: prefill pushes the pages while it computes them.

        Both get a key that is drawn for this request alone. Decode also gets the addresses of prefill's
        agents. Every answer of prefill has these, so the first request to an engine is sequential.
        """
        prefill = next(self._prefills)
        if prefill.ranks is None:
            return await self._in_turn(prefill, path, body, headers)
        own = {"version": 1, "push": secrets.token_hex(16)}
        kvxfer = {**own, "ranks": prefill.ranks}
        params = {"do_remote_prefill": True, "do_remote_decode": False, "kvxfer": kvxfer}
        decode = next(self._decodes)
        tasks = (
            asyncio.create_task(prefill.prefill(path, body, headers, kvxfer=own)),
            asyncio.create_task(decode.ask(path, {**body, "kv_transfer_params": params}, headers)),
        )
        try:
            # If one fails, the other need not go on.
            await asyncio.gather(*tasks)
            return tasks[1].result()
        except BaseException:
            # Prefill may have restarted, so its next answer gives the addresses anew.
            prefill.ranks = None
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            if not tasks[1].cancelled() and tasks[1].exception() is None:
                await tasks[1].result().aclose()
            raise

    async def _in_turn(
        self, prefill: Engine, path: str, body: Fields, headers: Mapping[str, str]
    ) -> httpx.Response:
        handed_over = await prefill.prefill(path, body, headers)
        if not handed_over:
            request = headers["X-Request-Id"]
            _log.warning(
                "%s handed nothing over for request %s; decode computes the prompt", prefill, request
            )
        told = {**body, "kv_transfer_params": handed_over or None}
        return await next(self._decodes).ask(path, told, headers)


def create_app(options: RouterOptions) -> FastAPI:
    """Returns the router as an ASGI application."""
    client = httpx.AsyncClient(
        timeout=httpx.Timeout(options.silence_timeout_s, connect=_CONNECT_TIMEOUT_S, pool=None),
        limits=httpx.Limits(keepalive_expiry=_KEEP_ALIVE_S),
    )
    router = Router(
        [Engine("prefill", url, client) for url in options.prefill],
        [Engine("decode", url, client) for url in options.decode],
    )
    serve = router.concurrent if options.dispatch == "concurrent" else router.sequential
    spans = RouterSpans()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with client:
            yield

    app = FastAPI(title="kvxfer bench router", lifespan=lifespan)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.exception_handler(RouteError)
    async def failed(_: Request, error: RouteError) -> Response:
        _log.warning("%s", error)
        return JSONResponse(error.body, error.status)

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def route(request: Request, body: Annotated[dict[str, Any], Body()]) -> Response:
        headers = {"X-Request-Id": request.headers.get("X-Request-Id") or uuid.uuid4().hex}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        path = request.url.path
        span, traced = spans.begin(f"POST {path}", headers["X-Request-Id"], request.headers)
        with contextlib.ExitStack() as until_it_ends:
            if span is not None:
                until_it_ends.callback(span.end)
            answer = await _while_client_waits(request, serve(path, body, headers | traced))
            if answer is None:
                return Response(status_code=_STATUS_OF_A_CLIENT_THAT_LEFT)
            ends = until_it_ends.pop_all()
        return StreamingResponse(
            _passed_on(answer, ends),
            media_type=answer.headers.get("content-type"),
            headers={"X-Request-Id": headers["X-Request-Id"]},
        )

    return app


async def _passed_on(answer: httpx.Response, ends: contextlib.ExitStack) -> AsyncIterator[bytes]:
    """Yields an answer as it comes. When the client leaves, closes the answer, and decode stops, too."""
    with ends:
        async with contextlib.aclosing(answer):
            async for piece in answer.aiter_bytes():
                yield piece


async def _while_client_waits(
    request: Request, work: Coroutine[Any, Any, httpx.Response]
) -> httpx.Response | None:
    """Runs ``work`` to its end, or cancels it when the client disconnects and returns ``None``."""
    working = asyncio.create_task(work)
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
    # The body has been read, so only the disconnection is left to receive.
    while (await request.receive())["type"] != "http.disconnect":
        pass


def run(options: RouterOptions) -> int:
    """Runs the router until it is told to end."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with socket.create_server((options.host, options.port)) as listener:
        config = uvicorn.Config(create_app(options), log_level="warning", timeout_graceful_shutdown=5)
        uvicorn.Server(config).run(sockets=[listener])
    return 0
