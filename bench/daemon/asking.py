"""Sends requests like the operators of a node do, one after the other, and measures each."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from kvxfer.bench.daemon.programs import Client, Program
from kvxfer.bench.errors import BenchError

#: One request of each kind, sent in turns.
KINDS: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("GET", "/v1/node", {}),
    ("GET", "/v1/agents", {}),
    ("GET", "/v1/regions", {}),
    ("GET", "/v1/peers", {}),
    ("GET", "/v1/leases", {}),
    ("GET", "/v1/transfers", {"limit": 20}),
    ("GET", "/v1/transfers", {"context": "request-1", "limit": 20}),
    ("GET", "/v1/events/recent", {"topic": "agents", "limit": 20}),
    ("GET", "/v1/settings", {}),
    ("GET", "/readyz", {}),
    ("PATCH", "/v1/settings", {}),
)
# A pause between two requests. Without it the client would be a load of its own.
_REST_S: Final = 0.01


class Asking:
    """Asks a daemon on a thread until `end`."""

    def __init__(self, daemon: Program) -> None:
        self._client = daemon.client()
        self._stopped = threading.Event()
        self._error: Exception | None = None
        self.took_ms: dict[str, list[float]] = {}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> dict[str, list[float]]:
        """Ends the thread. Returns the milliseconds of each kind of request."""
        self._stopped.set()
        self._thread.join()
        if self._error is not None:
            raise BenchError(f"a request failed: {self._error}")
        return self.took_ms

    def _run(self) -> None:
        try:
            with self._client as client:
                while not self._stopped.is_set():
                    for method, path, query in KINDS:
                        name = f"{method} {path}" + ("?" + next(iter(query)) if query else "")
                        took_ms = timed_ms(partial(_ask, client, method, path, query))
                        self.took_ms.setdefault(name, []).append(took_ms)
                        time.sleep(_REST_S)
        except Exception as error:
            self._error = error


def _ask(client: Client, method: str, path: str, query: dict[str, Any]) -> None:
    body = {"page_quotas_nbytes": {"bench": 1}} if method == "PATCH" else None
    status, answer = client.ask(method, path, body, **query)
    if status != 200:
        raise BenchError(f"{method} {path} answered {status}: {json.loads(answer).get('detail')}")


def timed_ms(work: Callable[[], Any]) -> float:
    """Returns how long something took."""
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3
