"""Log lines about failed loads: one line for all requests that failed at one engine for one reason."""

from __future__ import annotations

import logging
from typing import Final

_log = logging.getLogger("kvxfer")

# Requests named in one line; the others are counted, and named in debug lines.
_MOST_NAMED: Final = 16


class FailedLoads:
    """Gathers the failed loads that one pass over all fetches found."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str], list[str]] = {}
        self._why: dict[tuple[str, str], str] = {}

    def add(self, request_id: str, engine: str, code: str, why: str) -> None:
        """Adds a request, the engine that was to send its cache, and the reason for the failure."""
        key = (engine, code)
        self._requests.setdefault(key, []).append(request_id)
        self._why.setdefault(key, why)
        _log.debug("kvxfer: request %s: cache not loaded: %s", request_id, why)

    def tell(self) -> None:
        """Logs a line for each engine and code."""
        for (engine, code), requests in self._requests.items():
            named = ", ".join(requests[:_MOST_NAMED])
            if (more := len(requests) - _MOST_NAMED) > 0:
                named += f" and {more} more"
            _log.warning(
                "kvxfer: request%s %s: cache not loaded: %s",
                "s" if len(requests) > 1 else "",
                named,
                self._why[engine, code],
                extra={
                    "fields": {
                        "engine": engine,
                        "code": code,
                        "requests": requests[:_MOST_NAMED],
                        "num_requests": len(requests),
                    }
                },
            )
        self._requests.clear()
        self._why.clear()
