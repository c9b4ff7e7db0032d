"""Reads spans in the form of OpenTelemetry's exporters: OTLP over HTTP, in protobuf.

A body's cost is bounded before it is read: parsing holds the interpreter for about 20 ms at most.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final, NamedTuple

from kvxfer.control.schema.problems import Refusal
from kvxfer.control.state.span_table import EngineSpan

CONTENT_TYPE: Final = "application/x-protobuf"
#: The largest body, after decompression.
MAX_NBYTES: Final = 1024 * 1024
# Messages of one body that are looked at.
_MAX_SPANS: Final = 2000
_MAX_GROUPS: Final = 500
_MAX_ATTRIBUTES: Final = 16
_MAX_NAME: Final = 64
_MAX_TEXT: Final = 128
# A span that began before or after that is of another clock.
_NEAR_S: Final = 24 * 3600.0
_ERROR: Final = 2
# Attributes with a request's id: the conventions for generative AI, which vLLM follows, and SGLang's own.
_REQUEST_NAMES: Final = ("gen_ai.request.id", "request.id", "rid")
_ROOM: Final = "bootstrap_room"


class Read(NamedTuple):
    """Spans of one body, and how many of it were not taken."""

    spans: list[EngineSpan]
    num_rejected: int


def read_spans(body: bytes, encoding: str, now_s: float) -> Read:
    """Returns the spans of a request's body.

    Parameters
    ----------
    encoding
        Its ``Content-Encoding``.
    now_s
        The time of day: a span that began a day away from it is rejected.

    Raises
    ------
    Refusal
        ``unsupported``: OpenTelemetry is not installed here. ``invalid-argument``: the body has no valid
        spans. ``too-large``.
    """
    try:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    except ImportError:
        raise Refusal(
            "unsupported", "spans need OpenTelemetry at the daemon: pip install 'kvxfer[otel]'"
        ) from None
    try:
        told = ExportTraceServiceRequest.FromString(_unpacked(body, encoding))
        groups = list(_groups(told))
        read = (_span(process, span, now_s) for process, spans in groups for span in spans)
        spans = [span for span in islice(read, _MAX_SPANS) if span is not None]
    except Refusal:
        raise
    except Exception as error:
        raise Refusal("invalid-argument", f"the body is not spans of OTLP: {error!s:.200}") from None
    return Read(spans, sum(len(of) for _, of in groups) - len(spans))


def answer(num_rejected: int) -> bytes:
    """Returns the body of the answer: an ``ExportTraceServiceResponse``, empty where all spans were taken."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    response = ExportTraceServiceResponse()
    if num_rejected:
        response.partial_success.rejected_spans = num_rejected
        response.partial_success.error_message = (
            f"no ids of a span, of another day than this daemon's clock, or beyond {_MAX_SPANS} of a body"
        )
    return bytes(response.SerializeToString())


def _unpacked(body: bytes, encoding: str) -> bytes:
    if encoding not in ("", "identity", "gzip"):
        raise Refusal("unsupported-media-type", f"Content-Encoding {encoding!r:.50}: send gzip, or none")
    unpacked = body
    if encoding == "gzip":
        unpacking = zlib.decompressobj(wbits=31)
        unpacked = unpacking.decompress(body, MAX_NBYTES + 1)
        if len(unpacked) <= MAX_NBYTES and (not unpacking.eof or unpacking.unused_data):
            raise Refusal("invalid-argument", "the body must be one complete gzip member")
    if len(unpacked) > MAX_NBYTES:
        raise Refusal("too-large", f"spans may have {MAX_NBYTES} bytes, unpacked: send fewer at a time")
    return unpacked


def _groups(told: Any) -> Iterator[tuple[str, Any]]:
    """Yields the spans of each scope, and the process that they are of."""
    groups = (
        (resource.resource.attributes, scope.spans)
        for resource in islice(told.resource_spans, _MAX_GROUPS)
        for scope in islice(resource.scope_spans, _MAX_GROUPS)
    )
    for attributes, spans in islice(groups, _MAX_GROUPS):
        yield _process(dict(_texts(attributes))), spans


def _span(process: str, span: Any, now_s: float) -> EngineSpan | None:
    is_near = abs(span.start_time_unix_nano / 1e9 - now_s) < _NEAR_S
    if len(span.trace_id) != 16 or len(span.span_id) != 8 or not is_near:
        return None
    attributes = dict(_texts(span.attributes))
    error = (span.status.message[:_MAX_TEXT] or "error") if span.status.code == _ERROR else ""
    end_ns = span.end_time_unix_nano
    if not span.start_time_unix_nano <= end_ns <= (now_s + _NEAR_S) * 1e9:
        end_ns = span.start_time_unix_nano
    return EngineSpan(
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id[:8].hex(),
        span.name[:_MAX_TEXT],
        process,
        span.start_time_unix_nano,
        end_ns,
        error,
        tuple(attributes.items()),
        tuple(_requests(attributes)),
    )


def _process(resource: Mapping[str, str]) -> str:
    name, host = resource.get("service.name", "unnamed"), resource.get("host.name", "")
    return f"{name} on {host}" if host else name


def _texts(attributes: Iterable[Any]) -> Iterator[tuple[str, str]]:
    for each in islice(attributes, _MAX_ATTRIBUTES):
        kind = each.value.WhichOneof("value")
        if kind in ("string_value", "int_value", "double_value", "bool_value"):
            yield each.key[:_MAX_NAME], str(getattr(each.value, kind))[:_MAX_TEXT]


def _requests(attributes: Mapping[str, str]) -> Iterator[str]:
    for name in _REQUEST_NAMES:
        if value := attributes.get(name):
            yield value
    if room := attributes.get(_ROOM):
        # As kvxfer's connector for SGLang names a request in the records of its transfers.
        try:
            yield f"room {int(room, 0)}"
        except ValueError:
            yield room
