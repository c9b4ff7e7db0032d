"""Server-sent events, which a client can resume by index."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Annotated, Final

from fastapi import Query, Request
from starlette.responses import StreamingResponse

from kvxfer.control import schema
from kvxfer.control.app.api import Api
from kvxfer.control.app.guarded_route import caller_of
from kvxfer.control.daemon.node import NodeDaemon
from kvxfer.control.schema.problems import Refusal
from kvxfer.control.state.event_log import Wanted
from kvxfer.control.state.rates import OpenCounts
from kvxfer.control.state.tokens import Caller

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

#: Open streams of each caller, and of all callers together.
MOST_STREAMS_EACH: Final = 128
MOST_STREAMS: Final = 512
# Ends the stream of a client that has vanished, and keeps proxies from closing an idle one.
_KEEPALIVE_S: Final = 15.0
# Pause between reads for a stream that gets many events, so that it sends them by tens.
_GATHER_S: Final = 0.05
_MOST_AT_ONCE: Final = 256
Topic = Annotated[str, Query(min_length=1, max_length=64)]


class EventStreams:
    """Open event streams."""

    def __init__(self, daemon: NodeDaemon) -> None:
        self._daemon = daemon
        self._counts = OpenCounts(MOST_STREAMS_EACH, MOST_STREAMS)
        self._closing = asyncio.Event()
        self._wakers: dict[asyncio.Event, str] = {}
        daemon.tokens.on_revoked(self._revoked)

    @property
    def num_open(self) -> int:
        """How many streams are open."""
        return self._counts.total

    def close(self) -> None:
        """Ends all streams."""
        self._closing.set()
        for woken in self._wakers:
            woken.set()

    def _revoked(self, key: str) -> None:
        for woken, whose in self._wakers.items():
            if whose == key:
                woken.set()

    def open(self, caller: Caller, after: int, topics: list[str]) -> StreamingResponse:
        """Returns a stream of the events after an index."""
        if not self._counts.enter(caller.key):
            raise Refusal(
                "exhausted", f"{MOST_STREAMS_EACH} streams of {caller.name} (or {MOST_STREAMS}) are open"
            )
        return _Stream(self._run(caller, after, topics), lambda: self._counts.leave(caller.key))

    async def _run(self, caller: Caller, after: int, topics: list[str]) -> AsyncGenerator[bytes, None]:
        events = self._daemon.events
        wanted = Wanted(topics, caller.tenants)
        woken = asyncio.Event()
        self._wakers[woken] = caller.key
        yield f": events from {after + 1} of {self._daemon.incarnation}\n\n".encode()
        try:
            while not self._closing.is_set() and self._daemon.tokens.is_valid(caller):
                batch = events.read(after, wanted, _MOST_AT_ONCE)
                after = batch.after
                chunk = [event.encoded() for event in batch.events]
                if batch.missed:
                    told = json.dumps({"missed": batch.missed, "oldest": events.oldest})
                    chunk.insert(0, f"event: missed\ndata: {told}\n\n".encode())
                if chunk:
                    yield b"".join(chunk)
                if after < events.last:
                    await asyncio.sleep(0)
                    continue
                woken.clear()
                events.on_next(woken.set)
                try:
                    await asyncio.wait_for(woken.wait(), _KEEPALIVE_S)
                except TimeoutError:
                    # Tells the client its new index, though no event matched.
                    yield f": nothing\nid: {after}\n\n".encode()
                    continue
                await asyncio.sleep(_GATHER_S)
        finally:
            events.forget(woken.set)
            del self._wakers[woken]


class _Stream(StreamingResponse):
    """One stream; it counts as open until it ends, however that happens."""

    def __init__(self, content: AsyncGenerator[bytes, None], leave: Callable[[], None]) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self._content = content
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends until the client disconnects or the stream ends."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._content.aclose()
            self._leave()


def add_events(api: Api, daemon: NodeDaemon) -> EventStreams:
    """Adds them, and returns the streams."""
    streams = EventStreams(daemon)

    @api.get(
        "/v1/events",
        "read",
        tenants=True,
        tags=["events"],
        response_class=StreamingResponse,
        responses={
            200: {
                "description": "Server-sent events: `id` is the index, `event` the topic, `data` an Event; "
                "or `missed`: how many events were overwritten before they were sent",
                "content": {"text/event-stream": {"schema": {"type": "string"}}},
            }
        },
    )
    async def watch_events(
        request: Request,
        after: Annotated[
            int | None, Query(ge=0, lt=2**63, description="Continue after this index; default: from now on")
        ] = None,
        topic: Annotated[
            list[Topic] | None,
            Query(max_length=16, description="A topic and the topics below it, e.g. `transfers`"),
        ] = None,
    ) -> StreamingResponse:
        """Events as they happen. Without `after`, the header `Last-Event-ID` takes its place."""
        last = request.headers.get("last-event-id", "")
        if after is None and last.isascii() and last.isdigit() and len(last) < 19:
            after = int(last)
        return streams.open(caller_of(request), daemon.events.last if after is None else after, topic or [])

    @api.get("/v1/events/recent", "read", tenants=True, tags=["events"])
    async def list_events(
        request: Request,
        after: Annotated[int, Query(ge=0, lt=2**63)] = 0,
        topic: Annotated[list[Topic] | None, Query(max_length=16)] = None,
        limit: Annotated[int, Query(ge=1, le=250)] = 100,
    ) -> schema.Listed[schema.Event]:
        """Events that are still kept, oldest first; `next` is the index to continue after."""
        wanted = Wanted(topic or [], caller_of(request).tenants)
        batch = daemon.events.read(after, wanted, limit)
        items = [
            schema.Event(index=event.index, topic=event.topic, at_s=event.at_s, data=dict(event.data))
            for event in batch.events
        ]
        next_ = str(batch.after) if batch.after < daemon.events.last else None
        return schema.Listed[schema.Event](items=items, next=next_)

    return streams
