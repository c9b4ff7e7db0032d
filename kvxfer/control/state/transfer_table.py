"""Transfers of which an end has ended or which were made here: a bounded ring, found by id and by context.

An end is kept packed (about 200 bytes): a hundred thousand transfers with both ends are some 80 MB. The
oldest give way.
"""

from __future__ import annotations

import marshal
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from kvxfer.session.records import Record

#: As many as are kept unless the daemon is told otherwise.
CAPACITY: Final = 100_000
#: Rows that one call of `listed` looks at: about 5 ms.
MOST_LOOKED_AT: Final = 10_000
# https://www.w3.org/TR/trace-context/#traceparent-header
_TRACE: Final = re.compile(r"00-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
# Of an incarnation's 32 digits: 64 random bits of each agent and a number name a transfer well enough.
_DIGITS: Final = 16

EndName = Literal["source", "destination", "expectation"]
END_NAMES: Final[tuple[EndName, ...]] = ("source", "destination", "expectation")


class End(NamedTuple):
    """One end, as its agent told it."""

    agent: str
    agent_name: str
    clock_offset_ns: int
    record: Record


@dataclass(frozen=True, slots=True)
class Made:
    """What is known of a transfer that was made here: how to cancel it, and for whom it is."""

    agent: str
    session: int
    transfer: int
    is_source: bool
    by: str
    caller_key: str
    tenant: str
    context: str
    priority: int
    num_blocks: int
    until_s: float  # it has ended by then, though its record may be lost


class Entry:
    """One transfer."""

    __slots__ = ("_ends", "context", "id", "made", "outcome", "seq", "updated_at_s")

    def __init__(self, id_: str, seq: int, context: str, now_s: float) -> None:
        self.id = id_
        self.seq = seq
        self.context = context
        self.made: Made | None = None
        self.outcome: str = "pending"
        self.updated_at_s = now_s
        self._ends: list[tuple[str, str, int, bytes] | None] = [None, None, None]

    def end(self, name: EndName) -> End | None:
        """Returns what is known of one end."""
        kept = self._ends[END_NAMES.index(name)]
        return None if kept is None else End(*kept[:3], Record._make(marshal.loads(kept[3])))

    def has(self, name: EndName) -> bool:
        """Whether that end has ended."""
        return self._ends[END_NAMES.index(name)] is not None

    def put(self, end: End, now_s: float) -> None:
        """Takes what an end told of its ending."""
        record = end.record
        packed = marshal.dumps(tuple(record))
        self._ends[END_NAMES.index(record.role)] = (end.agent, end.agent_name, end.clock_offset_ns, packed)
        # The destination knows whether the bytes are there; a source that failed says nothing of that.
        if record.role != "source" or self._ends[1] is None:
            self.outcome = record.outcome
        self.updated_at_s = now_s

    @property
    def tenant(self) -> str:
        """For whom it is; ``""`` where that is not known."""
        return self.made.tenant if self.made is not None else ""

    @property
    def trace_parent(self) -> str | None:
        """What its context holds of a trace."""
        found = _TRACE.search(self.context)
        return found[0] if found else None

    @property
    def agents(self) -> Iterator[tuple[str, str]]:
        """Ids and names of the agents that told of it, or were told to begin it."""
        for kept in self._ends:
            if kept is not None:
                yield kept[0], kept[1]
        if self.made is not None:
            yield self.made.agent, ""


def transfer_id(initiator: str, other: str, number: int) -> str:
    """Returns the id of a transfer: the same wherever both incarnations and its number are known."""
    return f"{initiator[:_DIGITS]}-{other[:_DIGITS]}-{number}"


def id_of(record: Record, agent: str, peer: str) -> str:
    """Returns the id of a record's transfer, told by `agent` of its session with `peer`."""
    if record.role == "expectation":
        return f"{agent[:_DIGITS]}-expected-{record.handle}"
    return (
        transfer_id(agent, peer, record.transfer)
        if record.ours
        else transfer_id(peer, agent, record.transfer)
    )


@dataclass(frozen=True, slots=True)
class Filter:
    """Which transfers are listed; what is None does not matter."""

    agent: str | None = None
    state: str | None = None
    context: str | None = None
    tenant: str | None = None
    tenants: frozenset[str] | None = None
    since_s: float | None = None

    def __call__(self, entry: Entry) -> bool:
        if self.state is not None and entry.outcome != self.state:
            return False
        if self.since_s is not None and entry.updated_at_s < self.since_s:
            return False
        if self.tenant is not None and entry.tenant != self.tenant:
            return False
        if self.tenants is not None and entry.tenant not in self.tenants:
            return False
        return self.agent is None or any(self.agent in names for names in entry.agents)


class TransferTable:
    """The ring."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._ring: list[Entry | None] = [None] * capacity
        self._next = 0
        self._by_id: dict[str, Entry] = {}
        self._by_context: dict[str, deque[Entry]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, id_: str) -> Entry | None:
        """Returns a transfer by its id."""
        return self._by_id.get(id_)

    def add_end(self, id_: str, end: End, now_s: float) -> Entry:
        """Joins what an end told to what is known; returns the entry."""
        name = end.record.role
        entry = self._by_id.get(id_)
        # Numbers begin anew with each session of two agents: the ended one is set aside under another id.
        if entry is not None and entry.has(name):
            self._set_aside(entry)
            entry = None
        if entry is None:
            entry = self._add(id_, end.record.context, now_s)
        entry.put(end, now_s)
        return entry

    def add_made(self, id_: str, made: Made, now_s: float) -> Entry:
        """Adds one that was made here; its record may have come before."""
        entry = self._by_id.get(id_)
        if entry is None or entry.made is not None:
            if entry is not None:
                self._set_aside(entry)
            entry = self._add(id_, made.context, now_s)
        entry.made = made
        return entry

    def listed(self, wanted: Filter, before: int | None, limit: int) -> tuple[list[Entry], int | None]:
        """Returns the newest entries first, those before a cursor, and the next cursor (None at the end)."""
        found: list[Entry] = []
        last = None
        for looked_at, entry in enumerate(self._candidates(wanted.context, before)):
            if looked_at >= MOST_LOOKED_AT or len(found) >= limit:
                return found, last
            last = entry.seq
            if wanted(entry):
                found.append(entry)
        return found, None

    def _candidates(self, context: str | None, before: int | None) -> Iterator[Entry]:
        if context is not None:
            kept = self._by_context.get(context, ())
            yield from (entry for entry in reversed(kept) if before is None or entry.seq < before)
            return
        seq = self._next if before is None else min(before, self._next)
        oldest = max(0, self._next - self._capacity)
        while seq > oldest:
            seq -= 1
            entry = self._ring[seq % self._capacity]
            assert entry is not None
            yield entry

    def _add(self, id_: str, context: str, now_s: float) -> Entry:
        place = self._next % self._capacity
        if (oldest := self._ring[place]) is not None:
            self._forget(oldest)
        entry = Entry(id_, self._next, context, now_s)
        self._ring[place] = entry
        self._next += 1
        self._by_id[id_] = entry
        for key in _keys(context):
            self._by_context.setdefault(key, deque()).append(entry)
        return entry

    def _set_aside(self, entry: Entry) -> None:
        del self._by_id[entry.id]
        entry.id = f"{entry.id}.{entry.seq}"
        self._by_id[entry.id] = entry

    def _forget(self, entry: Entry) -> None:
        del self._by_id[entry.id]
        for key in _keys(entry.context):
            kept = self._by_context[key]
            kept.popleft()  # they give way in the order in which they came
            if not kept:
                del self._by_context[key]


def _keys(context: str) -> tuple[str, ...]:
    """Under what a transfer is found by its context: all of it, and a trace's id in it."""
    if not context:
        return ()
    found = _TRACE.search(context)
    return (context,) if found is None or found[1] == context else (context, found[1])
