"""Events by index: a ring that all watchers read at their own pace, with no queue for any of them.

A watcher is an index into the ring. If a watcher is too slow, the events that it would read next have been
overwritten, and it is told how many. So the memory does not depend on the watchers' number or pace.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

#: How many of the last events are kept.
CAPACITY: Final = 65536
#: How many indexes are reserved at a time, so that a killed daemon never gives one out twice.
RESERVE: Final = 1 << 20
# Events that one read examines, in about half a millisecond; then other tasks have their turn.
_MOST_AT_ONCE: Final = 8192
# Watchers that keep up read the same events at about the same time. So events are encoded once for all of
# them, in 350 bytes each.
_MOST_ENCODED: Final = 4096


# Index, topic, time, tenant, data as JSON or "", and the packed source of the data. A ring of objects would
# cost the garbage collector 30 ms; it does not traverse tuples of texts and numbers.
Row = tuple[int, str, float, str | None, str, Any]


class EventRecord:
    """One event, as a temporary view of its row."""

    __slots__ = ("_log", "_row")

    def __init__(self, log: EventLog, row: Row) -> None:
        self._log = log
        self._row = row

    @property
    def index(self) -> int:
        """Its position among all events."""
        return self._row[0]

    @property
    def topic(self) -> str:
        """The topic of the event."""
        return self._row[1]

    @property
    def at_s(self) -> float:
        """When it happened."""
        return self._row[2]

    @property
    def data(self) -> Mapping[str, Any]:
        """The details of the event."""
        found: Mapping[str, Any] = json.loads(self._data())
        return found

    def encoded(self) -> bytes:
        """Returns it as a server-sent event; encoded once for all watchers."""
        index, topic, at_s = self._row[:3]
        encoded = self._log._encoded.get(index)
        if encoded is None:
            text = f'{{"index":{index},"topic":{json.dumps(topic)},"at_s":{at_s},"data":{self._data()}}}'
            encoded = f"id: {index}\nevent: {topic}\ndata: {text}\n\n".encode()
            self._log._keep(index, encoded)
        return encoded

    def _data(self) -> str:
        return self._row[4] or _json(self._log._make(self._row[5]))


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"))


class Batch(NamedTuple):
    """The result of one read by a watcher.

    Attributes
    ----------
    events
        Matching events, oldest first.
    after
        The last index that was examined: where to continue.
    missed
        How many events, of all topics, were overwritten before this watcher read them.
    """

    events: Sequence[EventRecord]
    after: int
    missed: int


class _Topics(dict[str, bool]):
    """Caches whether each topic is wanted; the daemon has few topics."""

    def __init__(self, prefixes: tuple[str, ...]) -> None:
        super().__init__()
        self._prefixes = prefixes

    def __missing__(self, topic: str) -> bool:
        found = self[topic] = not self._prefixes or f"{topic}.".startswith(self._prefixes)
        return found


class Wanted:
    """The events that a watcher wants: topics, each including the topics below it, and tenants."""

    def __init__(self, topics: Sequence[str] = (), tenants: frozenset[str] | None = None) -> None:
        self._topics = _Topics(tuple(f"{topic.rstrip('.*')}." for topic in topics if topic.rstrip(".*")))
        self._tenants = tenants

    def of(self, rows: Sequence[Row]) -> list[Row]:
        """Returns the wanted rows, in 50 ns each.

        Events without a tenant are of agents and the whole node. A watcher that is limited to tenants gets
        none of them but the node's drain.
        """
        topics, tenants = self._topics, self._tenants
        found = [row for row in rows if topics[row[1]]]
        if tenants is None:
            return found
        return [row for row in found if row[3] in tenants or (row[3] is None and row[1].startswith("drain."))]


class EventLog:
    """The ring.

    Parameters
    ----------
    first
        The index of the first event: higher than every index that was ever given out.
    make
        Builds the data of an event from what `append_packed` was given.
    """

    def __init__(
        self, first: int = 1, capacity: int = CAPACITY, make: Callable[[Any], Mapping[str, Any]] = dict
    ) -> None:
        self._capacity = capacity
        self._make = make
        self._ring: list[Row] = []  # grows to its capacity
        # Events that watchers wanted recently.
        self._encoded: dict[int, bytes] = {}
        self._first = first
        self._next = first
        self._wakers: set[Callable[[], None]] = set()

    @property
    def last(self) -> int:
        """The index of the newest event; before the first event, the index below it."""
        return self._next - 1

    @property
    def oldest(self) -> int:
        """The index of the oldest event that is still there."""
        return max(self._first, self._next - self._capacity)

    def append(self, topic: str, now_s: float, data: Mapping[str, Any], tenant: str | None = None) -> None:
        """Adds one event; call `wake` once after adding one or several."""
        self._add((self._next, topic, now_s, tenant, _json(data), None))

    def append_packed(self, topic: str, now_s: float, packed: Any, tenant: str | None = None) -> None:
        """Adds one event; its data are built from `packed` only when a watcher wants them.

        Parameters
        ----------
        packed
            Texts, numbers and bytes, and tuples of these, which the garbage collector does not traverse.
        """
        self._add((self._next, topic, now_s, tenant, "", packed))

    def _add(self, row: Row) -> None:
        if len(self._ring) < self._capacity:
            self._ring.append(row)
        else:
            self._ring[self._place(self._next)] = row
        self._next += 1

    def _keep(self, index: int, encoded: bytes) -> None:
        self._encoded[index] = encoded
        if len(self._encoded) > _MOST_ENCODED:
            del self._encoded[next(iter(self._encoded))]

    def _place(self, index: int) -> int:
        return (index - self._first) % self._capacity

    def wake(self) -> None:
        """Calls all registered wakers once, and forgets them."""
        wakers, self._wakers = self._wakers, set()
        for waker in wakers:
            waker()

    def on_next(self, waker: Callable[[], None]) -> None:
        """Registers `waker` for the next `wake`."""
        self._wakers.add(waker)

    def forget(self, waker: Callable[[], None]) -> None:
        """Unregisters a waker."""
        self._wakers.discard(waker)

    def read(self, after: int, wanted: Wanted, most: int = 256) -> Batch:
        """Returns up to `most` events after `after`; events of an earlier run of the daemon count as missed.

        An index that was never given out (it came from another daemon) stands for the newest one.
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
            end = found[-1][0] + 1
        return Batch([EventRecord(self, row) for row in found], end - 1, missed)
