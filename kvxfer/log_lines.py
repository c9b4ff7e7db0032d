"""Log formats, for people or for programs that collect logs.

An engine's own logging configuration may name `JsonLines` for the logger ``kvxfer``
(``"()": "kvxfer.log_lines.JsonLines"``); ``kvxfer serve --log json`` does so for the daemon.
"""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime
from typing import Any, Final

from kvxfer.errors import KvxferError

#: Names of the formats in ``kvxfer serve --log``.
FORMATS: Final = ("plain", "json")


class JsonLines(logging.Formatter):
    """Writes a record as one JSON object.

    ``time`` (RFC 3339, UTC), ``level``, ``logger``, ``pid`` and ``message`` are always there. A kvxfer error
    among the arguments adds ``code`` and, if it has them, ``peer``, ``rail`` and ``context``;
    ``extra={"fields": {...}}`` adds its own; an exception adds ``exception`` with its traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line, without its end."""
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": os.getpid(),
            "message": record.getMessage(),
        }
        args = record.args if isinstance(record.args, tuple) else ()
        for error in (*args, record.exc_info[1] if record.exc_info else None):
            if isinstance(error, KvxferError):
                parts = {"peer": error.peer, "rail": error.rail, "context": error.context}
                told |= {"code": error.code, **{name: value for name, value in parts.items() if value}}
        told |= getattr(record, "fields", {})
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


class PlainLines(logging.Formatter):
    """Writes a record as one line for people; what a peer calls itself cannot begin another line."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Returns the line, in which characters that are not printed are escaped."""
        return _printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """Returns a traceback, whose lines begin with white space and have no such characters either."""
        return "\n".join(f"  {_printable(line)}" for line in super().formatException(ei).split("\n"))


def _printable(line: str) -> str:
    return line if line.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def write_to_stderr(format_: str) -> None:
    """Has what this process logs written to standard error, in one of `FORMATS`."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if format_ == "json" else PlainLines())
    logging.getLogger().addHandler(handler)
