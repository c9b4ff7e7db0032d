"""A request's way: ends of its transfers with their stages, and spans that engines and routers sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from kvxfer.control import schema
from kvxfer.control.schema.problems import Refusal
from kvxfer.control.state.span_table import EngineSpan, SpanTable
from kvxfer.control.state.tokens import Caller
from kvxfer.control.state.transfer_table import END_NAMES, TRACE_PARENT, End, Entry, Filter, TransferTable
from kvxfer.control.traces.spans import stages_of

#: Transfers and spans of one request that are shown: about 15 ms.
MOST_TRANSFERS: Final = 100
MOST_SPANS: Final = 500
_MOST_DEPTH: Final = 16
# How many requests are shown whose name contains the search text, if no name equals it.
_MOST_LIKE: Final = 8
_LEAST_OF_A_NAME: Final = 6
_MOST_OF_A_NAME: Final = 128  # of a record's context


class RequestTraces:
    """Finds what is known of requests."""

    def __init__(self, transfers: TransferTable, spans: SpanTable) -> None:
        self._transfers = transfers
        self._spans = spans

    def find(self, request: str, caller: Caller) -> schema.RequestTrace:
        """Returns the way of a request.

        Parameters
        ----------
        request
            The engine's id of the request, its trace's id, or a part of its id that no other request has,
            such as the id that a client or router gave it.

        Raises
        ------
        Refusal
            ``not-found``.
        """
        sees_spans = caller.tenants is None  # spans belong to no tenant
        found: dict[int, Entry] = {}
        names = [request]
        self._add(found, request, caller)
        is_of_spans = sees_spans and self._spans.traces_of(request)
        if not found and not is_of_spans and _LEAST_OF_A_NAME <= len(request) <= _MOST_OF_A_NAME:
            names = self._transfers.contexts_with(request, _MOST_LIKE, caller.tenants)
            for name in names:
                self._add(found, name, caller)
        traces = _traces_of(found.values())
        spans: list[EngineSpan] = []
        if sees_spans:
            for name in names:
                traces |= dict.fromkeys(self._spans.traces_of(name))
            if self._spans.of(request):
                traces[request] = None
            spans = list(islice((span for trace in traces for span in self._spans.of(trace)), MOST_SPANS))
        # Adds transfers of the same traces, and of the spans' names for the request (SGLang: a room).
        for name in dict.fromkeys((*traces, *(name for span in spans for name in span.requests))):
            self._add(found, name, caller)
        if not found and not spans:
            words = f"request {request!r:.200} is not known (any more)"
            if len(request) < _LEAST_OF_A_NAME:
                words += f"; a part of an id is looked for from {_LEAST_OF_A_NAME} characters on"
            raise Refusal("not-found", words)
        rows = [*_of_spans(spans), *(row for entry in found.values() for row in _of_entry(entry))]
        rows.sort(key=lambda row: (row.started_at_s, row.depth))
        return schema.RequestTrace(request=request, traces=list(traces), rows=rows)

    def _add(self, found: dict[int, Entry], name: str, caller: Caller) -> None:
        """Adds transfers of one name, up to the limit of a request."""
        if (room := MOST_TRANSFERS - len(found)) > 0:
            wanted = Filter(context=name, tenants=caller.tenants)
            found |= {entry.seq: entry for entry in self._transfers.listed(wanted, None, room)[0]}


def _traces_of(entries: Iterable[Entry]) -> dict[str, None]:
    found = (TRACE_PARENT.search(entry.context) for entry in entries)
    return {each[1]: None for each in found if each is not None}


def _of_entry(entry: Entry) -> Iterator[schema.TraceRow]:
    for name in END_NAMES:
        end = entry.end(name)
        if end is not None and end.record.posted_ns:
            yield from _of_end(entry.id, end)


def _of_end(transfer: str, end: End) -> Iterator[schema.TraceRow]:
    record = end.record
    details = {
        "transfer": transfer,
        "began_it": "yes" if record.ours else "no",
        "region": end.region_name,
        "peer": end.peer_name,
        "peer's region": end.remote_region_name,
        "blocks": str(record.num_blocks),
        "bytes": str(record.nbytes),
        "rails": ", ".join(record.rails),
        "outcome": record.outcome,
        "context": record.context,
    }
    error = "" if record.outcome == "done" else f"{record.outcome} [{record.code}] {record.message}".strip()
    words = {
        "source": "sends pages to",
        "destination": "takes pages from",
        "expectation": "expects pages from",
    }
    yield _row(
        end.agent_name,
        transfer,
        f"{words[record.role]} {end.peer_name or 'a peer'}",
        record.posted_ns + end.clock_offset_ns,
        max(record.ended_ns, record.posted_ns) + end.clock_offset_ns,
        0,
        error,
        {key: value for key, value in details.items() if value},
    )
    for name, start_ns, end_ns in stages_of(end):
        yield _row(end.agent_name, transfer, _STAGES[name], start_ns, end_ns, 1, "", {})


_STAGES: Final = {
    "right": "waits for the right",
    "first_piece": "until the first piece",
    "moving": "pages move",
}


def _of_spans(spans: Sequence[EngineSpan]) -> Iterator[schema.TraceRow]:
    by_id: dict[tuple[str, str], EngineSpan] = {}
    for span in spans:
        by_id.setdefault((span.trace, span.span), span)
    for span in by_id.values():
        depth, at = 0, span
        # The depth counts parents in the same process; a circle of parents has none.
        while (parent := by_id.get((at.trace, at.parent))) is not None and parent.process == at.process:
            depth, at = depth + 1, parent
            if depth > _MOST_DEPTH:
                depth = 0
                break
        yield _row(
            *(span.process, span.trace, span.name, span.start_ns, span.end_ns, depth, span.error),
            dict(span.attributes),
        )


def _row(
    process: str,
    lane: str,
    name: str,
    start_ns: int,
    end_ns: int,
    depth: int,
    error: str,
    details: dict[str, str],
) -> schema.TraceRow:
    return schema.TraceRow(
        process=process,
        lane=lane,
        name=name,
        started_at_s=start_ns / 1e9,
        took_us=(end_ns - start_ns) / 1e3,
        depth=depth,
        error=error,
        details=details,
    )
