"""Spans that engines and routers sent, found by trace and by request: a bounded ring."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Final, NamedTuple

#: How many spans are kept, and how many bytes of them.
CAPACITY: Final = 10_000
MOST_NBYTES: Final = 16 * 1024 * 1024
#: How many spans of one trace are kept; later ones are dropped.
MOST_OF_A_TRACE: Final = 500
# Traces that are remembered for one request, e.g. of its retries.
_MOST_OF_A_NAME: Final = 8


class EngineSpan(NamedTuple):
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

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        texts = chain((self.name, self.process, self.error), self.requests, *self.attributes)
        return 800 + sum(50 + len(text.encode(errors="replace")) for text in texts)


class SpanTable:
    """The ring."""

    def __init__(self, capacity: int = CAPACITY, most_nbytes: int = MOST_NBYTES) -> None:
        self._capacity = capacity
        self._most_nbytes = most_nbytes
        self._nbytes = 0
        self._oldest: deque[EngineSpan] = deque()
        self._by_trace: dict[str, list[EngineSpan]] = {}
        # How many spans of each trace name a request.
        self._by_request: dict[str, dict[str, int]] = {}

    def __len__(self) -> int:
        return len(self._oldest)

    def add(self, spans: Iterable[EngineSpan]) -> None:
        """Adds spans; the oldest spans are dropped. About 2 us each."""
        for span in spans:
            if len(self._by_trace.get(span.trace, ())) >= MOST_OF_A_TRACE:
                continue
            self._nbytes += span.nbytes
            self._oldest.append(span)
            self._by_trace.setdefault(span.trace, []).append(span)
            for request in span.requests:
                traces = self._by_request.setdefault(request, {})
                traces[span.trace] = traces.get(span.trace, 0) + 1
                if len(traces) > _MOST_OF_A_NAME:
                    del traces[next(iter(traces))]
            while len(self._oldest) > self._capacity or self._nbytes > self._most_nbytes:
                self._forget(self._oldest.popleft())

    def of(self, trace: str) -> Sequence[EngineSpan]:
        """Returns the spans of a trace, in the order in which they arrived."""
        return self._by_trace.get(trace, ())

    def traces_of(self, request: str) -> Iterable[str]:
        """Returns the newest traces of a request, by the name that a span gives it."""
        return self._by_request.get(request, ())

    def _forget(self, span: EngineSpan) -> None:
        self._nbytes -= span.nbytes
        kept = self._by_trace[span.trace]
        kept.pop(0)  # spans of a trace are forgotten in the order in which they came
        if not kept:
            del self._by_trace[span.trace]
        for request in span.requests:
            traces = self._by_request.get(request, {})
            if span.trace not in traces:
                continue
            traces[span.trace] -= 1
            if not traces[span.trace]:
                del traces[span.trace]
                if not traces:
                    del self._by_request[request]
