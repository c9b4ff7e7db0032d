"""Spans that engines and routers sent, found by trace and by request: a bounded ring."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

#: How many spans are kept; about 10 MB.
CAPACITY: Final = 10_000
#: How many spans of one trace are kept; later ones are dropped.
MOST_OF_A_TRACE: Final = 500
# Traces that are remembered for one request, e.g. of its retries.
_MOST_OF_A_NAME: Final = 8


class ToldSpan(NamedTuple):
    """One span as its program sent it: times in ns since 1970, attributes as texts."""

    trace: str
    span: str
    parent: str
    name: str
    process: str
    start_ns: int
    end_ns: int
    error: str
    attributes: tuple[tuple[str, str], ...]
    #: The request's names.
    requests: tuple[str, ...]


class SpanTable:
    """The ring."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._oldest: deque[ToldSpan] = deque()
        self._by_trace: dict[str, list[ToldSpan]] = {}
        self._by_request: dict[str, list[str]] = {}

    def __len__(self) -> int:
        return len(self._oldest)

    def add(self, spans: Iterable[ToldSpan]) -> None:
        """Adds spans; the oldest spans are dropped."""
        for span in spans:
            kept = self._by_trace.setdefault(span.trace, [])
            if len(kept) >= MOST_OF_A_TRACE:
                continue
            if len(self._oldest) >= self._capacity:
                self._forget(self._oldest.popleft())
                kept = self._by_trace.setdefault(span.trace, kept)
            self._oldest.append(span)
            kept.append(span)
            for request in span.requests:
                traces = self._by_request.setdefault(request, [])
                if span.trace not in traces and len(traces) < _MOST_OF_A_NAME:
                    traces.append(span.trace)

    def of(self, trace: str) -> Sequence[ToldSpan]:
        """Returns the spans of a trace, in the order in which they arrived."""
        return self._by_trace.get(trace, ())

    def traces_of(self, request: str) -> Sequence[str]:
        """Returns the traces of a request, by the name that a span gives it."""
        return self._by_request.get(request, ())

    def _forget(self, span: ToldSpan) -> None:
        kept = self._by_trace[span.trace]
        kept.remove(span)
        if kept:
            return
        del self._by_trace[span.trace]
        for request in span.requests:
            traces = self._by_request.get(request, [])
            if span.trace in traces:
                traces.remove(span.trace)
                if not traces:
                    del self._by_request[request]
