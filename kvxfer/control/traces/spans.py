"""Spans of transfers for an OpenTelemetry collector, made from agents' reports of their ends.

Engines take no part, so a collector cannot make a transfer fail or slow it down.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import kvxfer
from kvxfer.control.state.transfer_table import End, sampled_trace
from kvxfer.errors import UsageError, invalid
from kvxfer.log import logger

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

#: Spans that may wait for the collector; more are dropped.
_MOST_WAITING: Final = 8192
_EXPORT_S: Final = 5.0
_CLOSE_S: Final = 2.0


class Spans:
    """Sends a span for each end of a transfer, and one for each of its stages, in the trace of the request.

    The W3C ``traceparent`` of the request is in the transfer's context (``Agent.read(context=...)``).
    Transfers without one, and transfers of a request that is not sampled, have no spans.

    Parameters
    ----------
    node
        The daemon's node.
    endpoint
        ``http(s)://host:port`` of the collector (OTLP over HTTP). The exporter's own variables set headers
        and certificates (``OTEL_EXPORTER_OTLP_HEADERS`` and others).

    Raises
    ------
    UsageError
        ``unsupported``: OpenTelemetry is not installed. ``invalid-argument``: the address is malformed.
    """

    def __init__(self, node: str, endpoint: str) -> None:
        if not endpoint.startswith(("http://", "https://")):
            raise invalid(f"--otlp is {endpoint!r}: write a collector's http://HOST:PORT")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise UsageError(
                f"--otlp needs OpenTelemetry ({error}): pip install 'kvxfer[otel]'", code="unsupported"
            ) from error
        # `_logging_failures` logs failures, once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=_EXPORT_S)
        exporter.export = _logging_failures(exporter.export, endpoint)
        resource = {"service.name": "kvxfer", "service.version": kvxfer.__version__, "host.name": node}
        self._provider = TracerProvider(resource=Resource(resource), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=_MOST_WAITING))
        self._tracer = self._provider.get_tracer("kvxfer", kvxfer.__version__)

    def add(self, transfer: str, end: End) -> None:
        """Adds an end that has ended. It never waits; if the collector is too slow, spans are dropped."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        record = end.record
        parent = _parent(record.context)
        if parent is None or not record.posted_ns:
            return
        span = self._tracer.start_span(
            f"kvxfer {record.role}",
            context=parent,
            kind=SpanKind.CLIENT if record.ours else SpanKind.SERVER,
            start_time=record.posted_ns + end.clock_offset_ns,
            attributes={
                "kvxfer.transfer": transfer,
                "kvxfer.role": record.role,
                "kvxfer.agent": end.agent_name,
                "kvxfer.peer": end.peer_name,
                "kvxfer.region": end.region_name,
                "kvxfer.remote_region": end.remote_region_name,
                "kvxfer.context": record.context,
                "kvxfer.nbytes": record.nbytes,
                "kvxfer.num_blocks": record.num_blocks,
                "kvxfer.rails": list(record.rails),
                "kvxfer.outcome": record.outcome,
            },
        )
        if record.outcome != "done":
            span.set_attribute("error.type", record.code)
            span.set_status(Status(StatusCode.ERROR, record.message or record.code))
        within = set_span_in_context(span)
        for name, start_ns, end_ns in stages_of(end):
            stage = self._tracer.start_span(name, context=within, start_time=start_ns)
            stage.end(end_ns)
        span.end(record.ended_ns + end.clock_offset_ns)

    def close(self) -> None:
        """Sends waiting spans, for at most two seconds."""
        closing = threading.Thread(target=self._provider.shutdown, name="kvxfer-spans", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)


def _parent(context: str) -> Any:
    """Returns the span of the request that a context names, if the request is sampled."""
    from opentelemetry import trace

    if (found := sampled_trace(context)) is None:
        return None
    sampled = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    told = trace.SpanContext(int(found[0], 16), int(found[1], 16), True, sampled)
    return trace.set_span_in_context(trace.NonRecordingSpan(told)) if told.is_valid else None


def stages_of(end: End) -> Iterator[tuple[str, int, int]]:
    """Yields name, start and end of the stages that the end reached, with the names of /metrics."""
    record, offset_ns = end.record, end.clock_offset_ns
    stages = (
        ("right", record.posted_ns, record.begun_ns),
        ("first_piece", record.begun_ns, record.first_piece_ns),
        ("moving", record.first_piece_ns, record.ended_ns),
    )
    for name, start_ns, end_ns in stages:
        if 0 < start_ns <= end_ns:
            yield name, start_ns + offset_ns, end_ns + offset_ns


def _logging_failures(export: Any, endpoint: str) -> Any:
    """Wraps an export so that it logs once when it starts to fail, and once when it works again."""
    from opentelemetry.sdk.trace.export import SpanExportResult

    fails = False

    def told(spans: Sequence[ReadableSpan]) -> SpanExportResult:
        nonlocal fails
        result: SpanExportResult = export(spans)
        if (result is not SpanExportResult.SUCCESS) != fails:
            fails = not fails
            if fails:
                logger().warning(
                    "kvxfer: the collector at %s does not accept spans: they are dropped", endpoint
                )
            else:
                logger().info("kvxfer: the collector at %s accepts spans again", endpoint)
        return result

    return told
