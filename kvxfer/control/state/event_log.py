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
# Watchers who keep up want the same ones within a moment: they are written once for all, in 350 bytes each.
_MOST_ENCODED: Final = 4096


# Index, topic, time, tenant, data as JSON or "", and what those are made of. The garbage collector, which
# would take 30 ms for a full ring of objects, does not look at tuples of texts and numbers.
Row = tuple[int, str, float, str | None, str, Any]


class EventRecord:
    """One event, for the time of a look."""

    __slots__ = ("_log", "_row")

    def __init__(self, log: EventLog, row: Row) -> None:
        self._log = log
        self._row = row

    @property
    def index(self) -> int:
        """Its place in the order of all."""
        return self._row[0]

    @property
    def topic(self) -> str:
        """Of what kind it is."""
        return self._row[1]

    @property
    def at_s(self) -> float:
        """When it happened."""
        return self._row[2]

    @property
    def data(self) -> Mapping[str, Any]:
        """What happened."""
        found: Mapping[str, Any] = json.loads(self._data())
        return found

    def encoded(self) -> bytes:
        """Returns it as a server-sent event; made once for all watchers."""
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

    def of(self, rows: Sequence[Row]) -> list[Row]:
        """Returns those that are wanted; those of no tenant are everybody's. 50 ns each."""
        topics, tenants = self._topics, self._tenants
        found = [row for row in rows if topics[row[1]]]
        if tenants is None:
            return found
        return [row for row in found if row[3] is None or row[3] in tenants]


class EventLog:
    """The ring.

    Parameters
    ----------
    first
        The index of the first event: above all that were ever given.
    make
        Makes the data of what was given to `append_packed`.
    """

    def __init__(
        self, first: int = 1, capacity: int = CAPACITY, make: Callable[[Any], Mapping[str, Any]] = dict
    ) -> None:
        self._capacity = capacity
        self._make = make
        self._ring: list[Row] = []  # grows to its capacity
        # Of what watchers wanted last.
        self._encoded: dict[int, bytes] = {}
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

    def append(self, topic: str, now_s: float, data: Mapping[str, Any], tenant: str | None = None) -> None:
        """Adds one event; `wake` tells the watchers, once for many."""
        self._add((self._next, topic, now_s, tenant, _json(data), None))

    def append_packed(self, topic: str, now_s: float, packed: Any, tenant: str | None = None) -> None:
        """Adds one event, whose data are made of `packed` when somebody wants them.

        Parameters
        ----------
        packed
            Texts, numbers and bytes, and tuples of such, which the garbage collector does not look at.
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
            end = found[-1][0] + 1
        return Batch([EventRecord(self, row) for row in found], end - 1, missed)
