"""A request's way through both ends, engines and routers; and spans that engines and routers send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Final, TypeVar

from fastapi import Query, Request, Response

from kvxfer.control import schema
from kvxfer.control.app.api import Api
from kvxfer.control.app.guarded_route import caller_of
from kvxfer.control.daemon.node import NodeDaemon
from kvxfer.control.schema.problems import Refusal
from kvxfer.control.traces import otlp
from kvxfer.control.traces.perfetto import perfetto_of

Answer = TypeVar("Answer")

RequestName = Annotated[
    str,
    Query(
        min_length=1,
        max_length=256,
        description="The request's id, its trace's id, or a unique part of its id",
    ),
]


_BYTES: Final = {"schema": {"type": "string", "format": "binary"}}


# Bodies of spans that are read or wait for it; exporters send a refused one again.
_MOST_WAITING: Final = 4


class _Reading:
    """Reads bodies of spans one after the other, so that they keep one of the daemon's threads at most."""

    def __init__(self) -> None:
        self._in_turn = asyncio.Lock()
        self.num_waiting = 0

    async def run(self, read: Callable[..., Answer], *args: Any) -> Answer:
        """Runs a function in a thread, in its turn."""
        self.num_waiting += 1
        try:
            async with self._in_turn:
                return await asyncio.to_thread(read, *args)
        finally:
            self.num_waiting -= 1


def add_traces(api: Api, daemon: NodeDaemon) -> None:
    """Adds them."""
    reading = _Reading()
    # A look takes milliseconds: other requests have their turn between two of them.
    in_turn = asyncio.Lock()

    @api.get("/v1/request-trace", "read", tenants=True, tags=["traces"])
    async def get_request_trace(asked: Request, request: RequestName) -> schema.RequestTrace:
        """What this daemon knows of one request, ordered by start."""
        async with in_turn:
            return daemon.traces.find(request, caller_of(asked))

    @api.get("/v1/request-trace/perfetto", "read", tenants=True, tags=["traces"])
    async def get_perfetto_trace(asked: Request, request: RequestName) -> dict[str, Any]:
        """The same as a file for ui.perfetto.dev."""
        async with in_turn:
            return perfetto_of(daemon.traces.find(request, caller_of(asked)).rows)

    @api.keep(
        "POST",
        "/v1/traces",
        "transfer",
        tags=["traces"],
        response_class=Response,
        openapi_extra={"requestBody": {"required": True, "content": {otlp.CONTENT_TYPE: _BYTES}}},
        responses={200: {"description": "Taken", "content": {otlp.CONTENT_TYPE: _BYTES}}},
    )
    async def add_spans(request: Request) -> Response:
        """Accepts spans of engines and routers: OTLP over HTTP, in protobuf (`application/x-protobuf`)."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != otlp.CONTENT_TYPE:
            raise Refusal(
                "unsupported-media-type",
                f"Content-Type is {kind[:100]!r}: send {otlp.CONTENT_TYPE} "
                "(OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf)",
            )
        encoding = request.headers.get("content-encoding", "").strip().lower()
        if reading.num_waiting >= _MOST_WAITING:
            raise Refusal("exhausted", "other spans are being read", retry_after_s=1)
        read = await reading.run(otlp.read_spans, await request.body(), encoding, daemon.clock())
        daemon.engine_spans.add(read.spans)
        return Response(otlp.answer(read.num_rejected), headers={"content-type": otlp.CONTENT_TYPE})
