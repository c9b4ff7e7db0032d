"""Watchers of the daemon's events, each on its topics, and a laggard that reads only on command."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any, Final

from kvxfer.bench.run.channel import Channel, Message
from kvxfer.bench.run.process import End

_TIMEOUT_S: Final = 60.0
#: Topics, which watchers choose in turns. The first has many events, the others few.
TOPICS: Final = ("transfers.failed", "agents", "leases", "drain")
_FEW_NBYTES: Final = 4096


class WatchingEnd(End):
    """So many watchers, and the laggard."""

    def __init__(self, fields: Message, coordinator: Channel, peers: Any = ()) -> None:
        super().__init__(fields, coordinator, peers)
        self._api = Path(fields["runtime"]) / "api.sock"
        self._count = int(fields["watchers"])
        self._tasks: list[asyncio.Task[None]] = []
        self._seen: list[int] = []
        self._delays_ms: list[float] = []
        self._missed = 0
        self._news = asyncio.Event()
        self._laggard: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def begin(self) -> None:
        """Opens all streams. The laggard's is not read."""
        self._laggard = await self._open("")
        self._seen = [0] * self._count
        for number in range(self._count):
            reader, writer = await self._open(f"?topic={TOPICS[number % len(TOPICS)]}")
            self._tasks.append(asyncio.create_task(self._watch(number, reader, writer)))

    async def seen(self, failed: int) -> Message:
        """Waits until each watcher of failures has seen so many. Returns how late the events were."""
        watching = range(0, self._count, len(TOPICS))
        async with asyncio.timeout(_TIMEOUT_S):
            while any(self._seen[number] < failed for number in watching):
                self._news.clear()
                await self._news.wait()
        return {
            "delays_ms": self._delays_ms,
            "seen": [self._seen[number] for number in watching],
            "missed": self._missed,
        }

    async def read_late(self, last: int) -> Message:
        """Makes the laggard read up to an index. Returns how many events it got, and how many it missed."""
        assert self._laggard is not None
        reader, writer = self._laggard
        missed = seen = at = 0
        async with asyncio.timeout(_TIMEOUT_S):
            while at < last:
                event = await _event(reader)
                if event is None:
                    continue
                if "missed" in event:
                    missed += event["missed"]
                else:
                    at = event["index"]
                    seen += 1
        writer.close()
        return {"seen": seen, "missed": missed}

    async def aclose(self) -> None:
        """Ends the streams."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- inside ------------------------------------------------------------------------------------

    async def _open(self, query: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(str(self._api), limit=1 << 20)
        writer.write(f"GET /v1/events{query} HTTP/1.1\r\nHost: node\r\n\r\n".encode())
        async with asyncio.timeout(_TIMEOUT_S):
            await reader.readuntil(b": events from")
        return reader, writer

    async def _watch(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                event = await _event(reader)
                if event is None:
                    continue
                if "missed" in event:
                    self._missed += event["missed"]
                    continue
                self._seen[number] += 1
                self._news.set()
                if event["topic"].startswith("transfers."):
                    self._delays_ms.append((time.time() - event["at_s"]) * 1e3)
        finally:
            writer.close()


async def _event(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Returns the data of the next event, if the next line has any; a chunk's head has none."""
    line = await reader.readline()
    if not line:
        raise EOFError("the stream ended")
    if not line.startswith(b"data: "):
        return None
    found: dict[str, Any] = json.loads(line[6:])
    return found
