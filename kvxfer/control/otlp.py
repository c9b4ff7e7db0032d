"""Reads spans in the form of OpenTelemetry's exporters: OTLP over HTTP, in protobuf."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from kvxfer.control.problems import Refusal
from kvxfer.control.state.span_table import ToldSpan

CONTENT_TYPE: Final = "application/x-protobuf"
#: The largest body after decompression.
MAX_NBYTES: Final = 8 * 1024 * 1024
_MAX_ATTRIBUTES: Final = 32
_MAX_TEXT: Final = 256
_ERROR: Final = 2
# Attributes with a request's id: the conventions for generative AI, which vLLM follows, and SGLang's own.
_REQUEST_NAMES: Final = ("gen_ai.request.id", "request.id", "rid")
_ROOM: Final = "bootstrap_room"


def read_spans(body: bytes, encoding: str) -> list[ToldSpan]:
    """Returns the spans of a request's body; `encoding` is its ``Content-Encoding``.

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
            "unsupported", "spans need OpenTelemetry where the daemon runs: pip install 'kvxfer[otel]'"
        ) from None
    try:
        told = ExportTraceServiceRequest.FromString(_unpacked(body, encoding))
        return list(_spans(told))
    except Refusal:
        raise
    except Exception as error:
        raise Refusal("invalid-argument", f"no spans of OTLP: {error!s:.200}") from None


def _unpacked(body: bytes, encoding: str) -> bytes:
    if encoding in ("", "identity"):
        return body
    if encoding != "gzip":
        raise Refusal("unsupported-media-type", f"Content-Encoding {encoding!r:.50}: send gzip, or none")
    unpacking = zlib.decompressobj(wbits=31)
    unpacked = unpacking.decompress(body, MAX_NBYTES)
    if unpacking.unconsumed_tail:
        raise Refusal("too-large", f"a body has {MAX_NBYTES} bytes at most, unpacked")
    return unpacked


def _spans(told: Any) -> Iterator[ToldSpan]:
    for of_resource in told.resource_spans:
        process = _process(dict(_texts(of_resource.resource.attributes)))
        for scope in of_resource.scope_spans:
            for span in scope.spans:
                if len(span.trace_id) != 16 or len(span.span_id) != 8:
                    continue
                attributes = dict(_texts(span.attributes))
                is_error = span.status.code == _ERROR
                yield ToldSpan(
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.name[:_MAX_TEXT],
                    process,
                    span.start_time_unix_nano,
                    max(span.end_time_unix_nano, span.start_time_unix_nano),
                    (span.status.message[:_MAX_TEXT] or "error") if is_error else "",
                    tuple(attributes.items()),
                    tuple(_requests(attributes)),
                )


def _process(resource: Mapping[str, str]) -> str:
    name, host = resource.get("service.name", "unnamed"), resource.get("host.name", "")
    return f"{name} on {host}" if host else name


def _texts(attributes: Iterable[Any]) -> Iterator[tuple[str, str]]:
    for _, each in zip(range(_MAX_ATTRIBUTES), attributes, strict=False):
        kind = each.value.WhichOneof("value")
        if kind in ("string_value", "int_value", "double_value", "bool_value"):
            yield each.key[:_MAX_TEXT], str(getattr(each.value, kind))[:_MAX_TEXT]


def _requests(attributes: Mapping[str, str]) -> Iterator[str]:
    for name in _REQUEST_NAMES:
        if value := attributes.get(name):
            yield value
    if room := attributes.get(_ROOM):
        # The form in which kvxfer's connector for SGLang names a request in its transfers' records.
        try:
            yield f"room {int(room, 0)}"
        except ValueError:
            yield room
