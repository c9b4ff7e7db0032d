"""The state of a watcher of events: what it received, where to continue, and when to retry. No I/O."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kvxfer.control import schema
from kvxfer.control.client.client_error import ControlError

#: The daemon sends something every 15 s, so a connection that is silent for this long is dead.
SILENT_S: Final = 40.0
_FIRST_WAIT_S: Final = 0.2
_LONGEST_WAIT_S: Final = 5.0
# No daemon sends a longer line.
_MOST_NBYTES: Final = 1 << 22
# Retrying does not help after these statuses.
_FINAL: Final = frozenset({400, 401, 403, 404, 422})


class Missed(NamedTuple):
    """Events that a watcher lost: it was too slow or away, or they belong to an earlier run of the daemon.

    Attributes
    ----------
    num_indexes
        How many indexes were skipped, of all topics; a daemon that was killed leaves many out.
    oldest
        The index of the oldest event that the daemon still has.
    """

    num_indexes: int
    oldest: int


@dataclass
class EventCursor:
    """One watcher's position. The driver opens a stream with `params`, feeds it, and reports failures."""

    topics: tuple[str, ...]
    after: int | None
    incarnation: str = ""
    _buffer: bytes = b""
    _failures: int = 0

    @property
    def params(self) -> list[tuple[str, str]]:
        """Parameters of the next request."""
        asked = [("topic", topic) for topic in self.topics]
        return asked if self.after is None else [*asked, ("after", str(self.after))]

    def begin(self) -> None:
        """Starts a new stream: drops the unfinished event of the last one."""
        self._buffer = b""

    def feed(self, chunk: bytes) -> Iterator[schema.Event | Missed]:
        """Adds received bytes, and yields the events that are complete."""
        *blocks, self._buffer = (self._buffer + chunk).split(b"\n\n")
        if len(self._buffer) > _MOST_NBYTES:
            raise ControlError("protocol", "This is not a daemon's answer", "an event is too long", 200)
        for block in blocks:
            self._failures = 0
            if (found := self._read(block)) is not None:
                yield found

    def failed(self, status: int) -> float:
        """Returns the seconds to wait before opening the stream again; negative means never."""
        if status in _FINAL:
            return -1.0
        wait_s = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * (1 << min(self._failures, 10)))
        self._failures += 1
        return wait_s

    def _read(self, block: bytes) -> schema.Event | Missed | None:
        fields = _fields(block.decode("utf-8", "replace").split("\n"))
        if fields["comment"].startswith("events from "):
            self._opened(fields["comment"].split())
        if (index := fields["id"]).isascii() and index.isdigit():
            self.after = int(index)
        if not fields["data"]:
            return None
        try:
            told: Any = json.loads(fields["data"])
            if fields["event"] == "missed":
                return Missed(int(told["missed"]), int(told["oldest"]))
            return schema.Event.model_validate(told)
        except (ValueError, KeyError, TypeError) as error:
            raise ControlError("protocol", "This is not a daemon's answer", str(error), 200) from None

    def _opened(self, words: list[str]) -> None:
        """Reads ``events from INDEX of INCARNATION``: where to continue if it breaks before any event."""
        if len(words) == 5 and words[2].isdigit():
            self.incarnation = words[4]
            if self.after is None:
                self.after = int(words[2]) - 1


def _fields(lines: Iterable[str]) -> dict[str, str]:
    """Returns the fields of one event; a comment is in the field ``comment``."""
    found = {"id": "", "event": "", "data": "", "comment": ""}
    for line in lines:
        name, _, value = line.partition(":")
        found[name or "comment"] = value.removeprefix(" ")
    return found
