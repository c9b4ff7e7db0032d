"""Events by index: a ring that all watchers read at their own pace, with no queue for any of them.

A watcher is an index into the ring. Who reads too slowly finds that what comes next has been overwritten, and
is told how much. So what watchers cost in memory does not depend on their number or their pace.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

#: The last so many are there to be read again.
CAPACITY: Final = 65536
#: How many indexes are set aside at a time, so that a killed daemon never gives one twice.
RESERVE: Final = 1 << 20
# A look at so many events takes about half a millisecond; then others have their turn.
_MOST_AT_ONCE: Final = 8192


class EventRecord:
    """One event. Its data are made, and written as JSON, when the first watcher wants them."""

    __slots__ = ("_data", "_encoded", "_make", "at_s", "index", "tenant", "topic")

    def __init__(
        self,
        index: int,
        topic: str,
        at_s: float,
        data: Any,
        tenant: str | None,
        make: Callable[[Any], Mapping[str, Any]] | None = None,
    ) -> None:
        self.index = index
        self.topic = topic
        self.at_s = at_s
        self.tenant = tenant
        self._data = data
        self._make = make
        self._encoded: bytes | None = None

    @property
    def data(self) -> Mapping[str, Any]:
        """What happened."""
        told: Mapping[str, Any] = self._data if self._make is None else self._make(self._data)
        return told

    def encoded(self) -> bytes:
        """Returns it as a server-sent event."""
        if self._encoded is None:
            shown = {"index": self.index, "topic": self.topic, "at_s": self.at_s, "data": self.data}
            text = json.dumps(shown, separators=(",", ":"))
            self._encoded = f"id: {self.index}\nevent: {self.topic}\ndata: {text}\n\n".encode()
        return self._encoded


class Batch(NamedTuple):
    """What a watcher gets at once.

    Attributes
    ----------
    events
        Those that match, oldest first.
    after
        The last index that was looked at: where to go on.
    missed
        How many events, of all topics, had been overwritten before they were looked at.
    """

    events: Sequence[EventRecord]
    after: int
    missed: int


class _Topics(dict[str, bool]):
    """Whether each topic is wanted; the daemon's are few, and each is looked at once."""

    def __init__(self, prefixes: tuple[str, ...]) -> None:
        super().__init__()
        self._prefixes = prefixes

    def __missing__(self, topic: str) -> bool:
        found = self[topic] = not self._prefixes or f"{topic}.".startswith(self._prefixes)
        return found


class Wanted:
    """Which events a watcher wants: topics, each with those below it, and tenants."""

    def __init__(self, topics: Sequence[str] = (), tenants: frozenset[str] | None = None) -> None:
        self._topics = _Topics(tuple(f"{topic.rstrip('.*')}." for topic in topics if topic.rstrip(".*")))
        self._tenants = tenants

    def of(self, events: Sequence[EventRecord]) -> list[EventRecord]:
        """Returns those that are wanted; those of no tenant are everybody's. 50 ns each."""
        topics, tenants = self._topics, self._tenants
        found = [event for event in events if topics[event.topic]]
        if tenants is None:
            return found
        return [event for event in found if event.tenant is None or event.tenant in tenants]


class EventLog:
    """The ring.

    Parameters
    ----------
    first
        The index of the first event: above all that were ever given.
    """

    def __init__(self, first: int = 1, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._ring: list[EventRecord] = []  # grows to its capacity
        self._first = first
        self._next = first
        self._wakers: set[Callable[[], None]] = set()

    @property
    def last(self) -> int:
        """The index of the newest event, or of what was before the first."""
        return self._next - 1

    @property
    def oldest(self) -> int:
        """The index of the oldest event that is still there."""
        return max(self._first, self._next - self._capacity)

    def append(
        self,
        topic: str,
        now_s: float,
        data: Any,
        tenant: str | None = None,
        make: Callable[[Any], Mapping[str, Any]] | None = None,
    ) -> None:
        """Adds an event; `wake` tells the watchers, once for many.

        Parameters
        ----------
        data
            An object of JSON, or what `make` makes one of when somebody wants it.
        """
        event = EventRecord(self._next, topic, now_s, data, tenant, make)
        if len(self._ring) < self._capacity:
            self._ring.append(event)
        else:
            self._ring[self._place(self._next)] = event
        self._next += 1

    def _place(self, index: int) -> int:
        return (index - self._first) % self._capacity

    def wake(self) -> None:
        """Calls who waits for events, each once."""
        wakers, self._wakers = self._wakers, set()
        for waker in wakers:
            waker()

    def on_next(self, waker: Callable[[], None]) -> None:
        """Has `waker` called at the next `wake`."""
        self._wakers.add(waker)

    def forget(self, waker: Callable[[], None]) -> None:
        """Has it called no more."""
        self._wakers.discard(waker)

    def read(self, after: int, wanted: Wanted, most: int = 256) -> Batch:
        """Returns events above `after`, up to `most`; all events of a daemon's before are missed.

        An index that was never given (another daemon's) is taken for the newest one.
        """
        if after > self.last:
            after = self.last
        begin = max(after + 1, self.oldest)
        missed = begin - after - 1
        end = min(self._next, begin + _MOST_AT_ONCE)
        here, there = self._place(begin), self._place(end)
        if begin == end:
            return Batch((), end - 1, missed)
        ring = self._ring
        slots = ring[here:there] if here < there else ring[here:] + ring[:there]
        found = wanted.of(slots)
        if len(found) > most:
            found = found[:most]
            end = found[-1].index + 1
        return Batch(found, end - 1, missed)
