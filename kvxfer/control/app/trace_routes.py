"""A request's way through both ends, engines and routers; and spans that engines and routers send."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import Query, Request, Response

from kvxfer.control import otlp, schema
from kvxfer.control.app.api import Api, caller_of, require_all_tenants
from kvxfer.control.node import NodeDaemon
from kvxfer.control.perfetto import perfetto_of
from kvxfer.control.problems import Refusal

RequestName = Annotated[
    str,
    Query(
        min_length=1,
        max_length=256,
        description="The request's id, its trace's id, or a part of its id that no other has",
    ),
]


def add_traces(api: Api, daemon: NodeDaemon) -> None:
    """Adds them."""

    @api.get("/v1/request-trace", "read", tags=["traces"])
    async def get_request_trace(asked: Request, request: RequestName) -> schema.RequestTrace:
        """What this daemon knows of one request, ordered by start."""
        return daemon.traces.find(request, caller_of(asked))

    @api.get("/v1/request-trace/perfetto", "read", tags=["traces"])
    async def get_perfetto_trace(asked: Request, request: RequestName) -> dict[str, Any]:
        """The same as a file for ui.perfetto.dev."""
        return perfetto_of(daemon.traces.find(request, caller_of(asked)).rows)

    @api.keep("POST", "/v1/traces", "transfer", tags=["traces"], response_class=Response)
    async def add_spans(request: Request) -> Response:
        """Accepts spans of engines and routers: OTLP over HTTP, in protobuf (`application/x-protobuf`)."""
        require_all_tenants(caller_of(request), "a span")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != otlp.CONTENT_TYPE:
            raise Refusal(
                "unsupported-media-type",
                f"Content-Type is {kind[:100]!r}: send {otlp.CONTENT_TYPE} "
                "(OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf)",
            )
        encoding = request.headers.get("content-encoding", "").strip().lower()
        daemon.spans_told.add(await asyncio.to_thread(otlp.read_spans, await request.body(), encoding))
        # An empty ExportTraceServiceResponse means that all spans were accepted.
        return Response(b"", headers={"content-type": otlp.CONTENT_TYPE})
