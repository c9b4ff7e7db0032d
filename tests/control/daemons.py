"""A daemon's end of the link, on its own loop and thread, so that agents and tests may block."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from kvxfer.control.agents.agent_links import AgentLinks
from kvxfer.control.agents.attached import Attached
from kvxfer.session.records import Record
from tests.control.raw_ends import BOUND_S
from tests.waiting import until

T = TypeVar("T")


class Daemon:
    """Accepts agents in its own folder, and keeps what they report; `stop` and `start` control it."""

    def __init__(self, folder: Path | None = None, **options: Any) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="kvxfer")  # short enough for a socket's path
        self.folder = folder or Path(self._temporary.name) / "run"
        self._options = options
        self.records: list[tuple[str, Record]] = []
        self.changes: list[tuple[str, frozenset[str]]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="daemon")
        self._thread.start()
        self.links: AgentLinks | None = None

    def __enter__(self) -> Daemon:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.do(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._temporary.cleanup()

    def do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(BOUND_S)

    def start(self) -> None:
        links = AgentLinks(self.folder, on_records=self.on_records, on_change=self.on_change, **self._options)
        self.do(links.start())
        self.links = links

    def stop(self) -> None:
        if self.links is not None:
            self.do(self.links.aclose())

    def on_records(self, attached: Attached, records: list[Record]) -> None:
        self.records += [(attached.name, record) for record in records]

    def records_of(self, name: str) -> list[Record]:
        return [record for agent, record in self.records if agent == name]

    def on_change(self, attached: Attached, changed: frozenset[str]) -> None:
        self.changes.append((attached.name, changed))

    def call(self, name: str, verb: str, **args: Any) -> dict[str, Any]:
        assert self.links is not None
        return self.do(self.links.call(self.agent(name).incarnation, verb, args, BOUND_S))

    def agent(self, name: str) -> Attached:
        """Waits until the agent of that name is attached and has reported its state, and returns it."""
        until(lambda: self.find(name) is not None, f"{name} is not attached")
        found = self.find(name)
        assert found is not None
        return found

    def find(self, name: str) -> Attached | None:
        assert self.links is not None
        for attached in list(self.links.agents.values()):
            if attached.name == name and (attached.stats or name.startswith("raw")):
                return attached
        return None
