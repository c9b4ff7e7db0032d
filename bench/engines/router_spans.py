"""Spans of the router's requests, if OpenTelemetry's own variables name a collector."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_CARRIED: Final = ("traceparent", "tracestate")


class RouterSpans:
    """Makes a span for each request. Engines get its ``traceparent``; without a collector, the client's."""

    def __init__(self) -> None:
        self._tracer: Any = None
        if _ENDPOINT in os.environ:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            provider = TracerProvider()
            provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(), schedule_delay_millis=500))
            self._tracer = provider.get_tracer("kvxfer.bench.engines.router")

    def begin(self, name: str, request_id: str, told: Mapping[str, str]) -> tuple[Any, dict[str, str]]:
        """Returns the span, which the caller ends (None if there is none), and headers for engines."""
        carried = {key: told[key] for key in _CARRIED if key in told}
        if self._tracer is None:
            return None, carried
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        propagator = TraceContextTextMapPropagator()
        span = self._tracer.start_span(
            name, context=propagator.extract(carried), attributes={"request.id": request_id}
        )
        headers: dict[str, str] = {}
        propagator.inject(headers, context=trace.set_span_in_context(span))
        return span, headers
