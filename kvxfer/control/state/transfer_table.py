"""Transfers that were made here, or have an end that has ended: a bounded ring, found by id and by context.

A hundred thousand transfers with both ends take about 100 MB. They cost the garbage collector nothing,
because it does not traverse rows, which are plain tuples of texts, numbers and bytes. `Entry` is a temporary
view of a row. The oldest rows are overwritten.
"""

from __future__ import annotations

import marshal
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal, NamedTuple

from kvxfer.session.records import Record

#: How many transfers are kept by default.
CAPACITY: Final = 100_000
#: Rows that one call of `listed` examines: about 3 ms.
MOST_LOOKED_AT: Final = 10_000
# Rows that are examined at a time, so that a call which finds enough among the newest rows stops early.
_AT_ONCE: Final = 512
# https://www.w3.org/TR/trace-context/#traceparent-header
#: The part of a context that identifies a trace: its id, the span of the request, and flags.
TRACE_PARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED: Final = 0x01
# Digits of an incarnation in a transfer's id: 64 random bits of each agent, and a number, are unique enough.
_DIGITS: Final = 16

EndName = Literal["source", "destination", "expectation"]
END_NAMES: Final[tuple[EndName, ...]] = ("source", "destination", "expectation")
_PLACES: Final = {"source": 5, "destination": 6, "expectation": 7}
_SOURCE: Final = 5
_DESTINATION: Final = 6
# Up to so many transfers of one context are kept in a tuple: a deque takes 700 bytes.
_FEW: Final = 8
# Records of one agent that may arrive while the daemon asks it to begin a transfer.
_MOST_EARLY: Final = 65536


# Names of an end: its region, its peer's incarnation and name, and the peer's region; "" if not known. Ends
# between the same regions share one plain tuple, which the garbage collector does not traverse.
Names = tuple[str, str, str, str]
NO_NAMES: Final[Names] = ("", "", "", "")


class End(NamedTuple):
    """One end, as its agent reported it."""

    agent: str
    agent_name: str
    clock_offset_ns: int
    record: Record
    names: Names = NO_NAMES

    @property
    def region_name(self) -> str:
        """The name of its region, even if the region is gone."""
        return self.names[0]

    @property
    def peer(self) -> str:
        """The incarnation of the agent at the other end."""
        return self.names[1]

    @property
    def peer_name(self) -> str:
        """The name of the agent at the other end."""
        return self.names[2]

    @property
    def remote_region_name(self) -> str:
        """The name of the region at the other end."""
        return self.names[3]


@dataclass(frozen=True, slots=True)
class Made:
    """What the daemon knows of a transfer that was made here: how to cancel it, and for whom it is."""

    agent: str
    handle: int
    by: str
    caller_key: str
    tenant: str
    context: str
    priority: int
    num_blocks: int
    until_s: float  # it has ended by then, even if its record was lost

    @property
    def id(self) -> str:
        """Its id until an agent reports one of its ends; it stays valid for finding the transfer."""
        return f"{self.agent[:_DIGITS]}-handle-{self.handle}"


# A stored end: agent, name, clock offset, names, and its record in 150 to 250 bytes.
PackedEnd = tuple[str, str, int, Names, bytes]
# Id, sequence number, context, outcome, time of the last change, and the three ends.
Row = tuple[str, int, str, str, float, PackedEnd | None, PackedEnd | None, PackedEnd | None]


def pack(end: End) -> PackedEnd:
    """Returns an end in its stored form."""
    return (*end[:3], end.names, marshal.dumps(tuple(end.record)))


def unpack(packed: PackedEnd) -> End:
    """Returns the end from its stored form."""
    agent, name, offset_ns, names, record = packed
    return End(agent, name, offset_ns, Record._make(marshal.loads(record)), names)


class Entry:
    """One transfer, as it was at the time of the look-up."""

    __slots__ = ("_ends", "context", "id", "made", "outcome", "seq", "updated_at_s")

    def __init__(self, row: Row, made: Made | None) -> None:
        self.id, self.seq, self.context, self.outcome, self.updated_at_s, *self._ends = row
        self.made = made

    def end(self, name: EndName) -> End | None:
        """Returns one end, or None if it is not known."""
        kept = self._ends[END_NAMES.index(name)]
        return None if kept is None else unpack(kept)

    @property
    def tenant(self) -> str:
        """The tenant that it is for; ``""`` if not known."""
        return self.made.tenant if self.made is not None else ""

    @property
    def trace_parent(self) -> str | None:
        """The W3C ``traceparent`` in its context."""
        found = TRACE_PARENT.search(self.context)
        return found[0] if found else None


def sampled_trace(context: str) -> tuple[str, str] | None:
    """Returns trace and span of the request that a context names, if the request is sampled."""
    found = TRACE_PARENT.search(context)
    return (found[1], found[2]) if found is not None and int(found[3], 16) & _SAMPLED else None


def transfer_id(initiator: str, other: str, number: int) -> str:
    """Returns the id of a transfer; it depends only on both incarnations and the number."""
    return f"{initiator[:_DIGITS]}-{other[:_DIGITS]}-{number}"


def id_of(record: Record, agent: str, peer: str) -> str:
    """Returns the id of a record's transfer; `agent` reported the record, of its session with `peer`."""
    if record.role == "expectation":
        return f"{agent[:_DIGITS]}-expected-{record.handle}"
    return (
        transfer_id(agent, peer, record.transfer)
        if record.ours
        else transfer_id(peer, agent, record.transfer)
    )


@dataclass(frozen=True, slots=True)
class Filter:
    """Which transfers a list contains; a criterion that is None does not matter."""

    agent: str | None = None
    state: str | None = None
    context: str | None = None
    tenant: str | None = None
    tenants: frozenset[str] | None = None
    since_s: float | None = None

    def of(self, rows: Sequence[Row], made: Mapping[int, Made]) -> Sequence[Row]:
        """Returns the wanted rows, in order; 50 ns a row and criterion, 300 ns for the agent."""
        if self.state is not None:
            rows = [row for row in rows if row[3] == self.state]
        if self.since_s is not None:
            rows = [row for row in rows if row[4] >= self.since_s]
        if self.tenant is not None:
            rows = [row for row in rows if _tenant(row, made) == self.tenant]
        if self.tenants is not None:
            rows = [row for row in rows if _tenant(row, made) in self.tenants]
        if self.agent is not None:
            rows = [row for row in rows if self._is_of_agent(row, made)]
        return rows

    def _is_of_agent(self, row: Row, made: Mapping[int, Made]) -> bool:
        agent = self.agent
        for end in row[5:]:
            if end is not None and (end[0] == agent or end[1] == agent):
                return True
        by = made.get(row[1])
        return by is not None and by.agent == agent


def _tenant(row: Row, made: Mapping[int, Made]) -> str:
    by = made.get(row[1])
    return "" if by is None else by.tenant


class TransferTable:
    """The ring."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._ring: list[Row] = []  # grows to its capacity
        self._next = 0
        self._seq_by_id: dict[str, int] = {}
        # The numbers of a context's transfers: one number, a few in a tuple, or many in a deque.
        self._by_context: dict[str, int | tuple[int, ...] | deque[int]] = {}
        self._made: dict[int, Made] = {}
        self._seq_by_handle: dict[tuple[str, int], int] = {}
        # The id that was given when the transfer was made, for transfers that now have their final id.
        self._made_ids: dict[int, str] = {}
        # For agents that are being asked to begin transfers: handles of records that arrived meanwhile.
        self._early: dict[str, dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._seq_by_id) - len(self._made_ids)

    def get(self, id_: str) -> Entry | None:
        """Returns a transfer by its id, or by its `made_id`."""
        seq = self._seq_by_id.get(id_)
        return None if seq is None else self._entry(seq)

    def at(self, seq: int) -> Entry | None:
        """Returns a transfer by its number; None if it was overwritten."""
        if not max(0, self._next - self._capacity) <= seq < self._next:
            return None
        return self._entry(seq)

    def tenant_of(self, seq: int) -> str:
        """Returns the tenant of a transfer; ``""`` if not known."""
        made = self._made.get(seq)
        return "" if made is None else made.tenant

    def made_id_of(self, seq: int) -> str | None:
        """Returns the `made_id` of a transfer; None if it was not made here."""
        made = self._made.get(seq)
        return None if made is None else made.id

    def add_end(self, id_: str, end: End, packed: PackedEnd, now_s: float) -> int:
        """Joins the report of an end with what is known of its transfer; returns the transfer's number."""
        record = end.record
        place = _PLACES[record.role]
        self.know(id_, end.agent, record)
        seq = self._seq_by_id.get(id_)
        row = None if seq is None else self._ring[seq % self._capacity]
        # A new session of the same agents uses numbers again. The earlier transfer gets another id.
        if row is not None and row[place] is not None:
            self._set_aside(row)
            row = None
        if row is None:
            row = self._add(id_, record.context, now_s)
        if record.handle and (early := self._early.get(end.agent)) is not None and len(early) < _MOST_EARLY:
            early[record.handle] = row[1]
        fields = list(row)
        fields[place] = packed
        fields[3] = _outcome(row, place, record.outcome)
        fields[4] = now_s
        self._ring[row[1] % self._capacity] = tuple(fields)  # type: ignore[assignment]
        return row[1]

    @contextmanager
    def making(self, agent: str) -> Iterator[None]:
        """Remembers records that the agent reports meanwhile: they may arrive before the agent's answer."""
        outer = self._early.get(agent)
        if outer is None:
            self._early[agent] = {}
        try:
            yield
        finally:
            if outer is None:
                del self._early[agent]

    def add_made(self, made: Made, now_s: float) -> Entry:
        """Adds a transfer that was made here; call it within `making`."""
        seq = self._early.get(made.agent, {}).get(made.handle)
        if seq is None or self.at(seq) is None:
            seq = self._add(made.id, made.context, now_s)[1]
            self._seq_by_handle[made.agent, made.handle] = seq
        else:
            self._made_ids[seq] = made.id
            self._seq_by_id[made.id] = seq
        self._made[seq] = made
        return self._entry(seq)

    def know(self, id_: str, agent: str, record: Record) -> None:
        """Gives a transfer that was made here its final id, and joins it with reports under that id."""
        seq = self._seq_by_handle.pop((agent, record.handle), None) if record.handle else None
        if seq is None:
            return
        other = self._seq_by_id.get(id_)
        row = self._row(seq)
        if other is not None:
            told = self._row(other)
            if told[_PLACES[record.role]] is None:
                row = (*row[:3], *told[3:])
                self._forget(told)
                self._ring[other % self._capacity] = ("", other, "", "", 0.0, None, None, None)
            else:
                self._set_aside(told)  # a transfer of an earlier session, which used the same number
        self._made_ids[seq] = row[0]
        self._seq_by_id[id_] = seq
        self._ring[seq % self._capacity] = (id_, *row[1:])

    def fail(self, seq: int, now_s: float) -> None:
        """Marks a transfer that was made here as failed, because its end will never be reported."""
        row = self._ring[seq % self._capacity]
        if row[1] == seq:
            self._ring[seq % self._capacity] = (*row[:3], "failed", now_s, *row[5:])

    def listed(self, wanted: Filter, before: int | None, limit: int) -> tuple[list[Entry], int | None]:
        """Returns entries before a cursor, the newest first, and the next cursor (None at the end)."""
        found: list[Entry] = []
        last = None
        for rows in self._candidates(wanted.context, before):
            for row in wanted.of([row for row in rows if row[0]], self._made):
                if len(found) >= limit:
                    return found, found[-1].seq
                found.append(self._entry(row[1]))
            last = rows[-1][1]
        return found, last if last is not None and self._is_before(wanted.context, last) else None

    def contexts_with(self, part: str, most: int, tenants: frozenset[str] | None = None) -> list[str]:
        """Returns contexts that contain a text, e.g. the id that a client gave a request, the newest first.

        Looks at the newest `MOST_LOOKED_AT` transfers; where tenants are named, at theirs alone.
        """
        wanted = Filter(tenants=tenants)
        found: dict[str, None] = {}
        for rows in self._candidates(None, None):
            if len(found) >= most:
                break
            found |= dict.fromkeys(row[2] for row in wanted.of(rows, self._made) if part in row[2])
        return list(found)[:most]

    def _is_before(self, context: str | None, seq: int) -> bool:
        """Whether a list has a transfer after this number."""
        return any(True for _ in self._seqs(context, seq))

    def _candidates(self, context: str | None, before: int | None) -> Iterator[list[Row]]:
        """Yields the rows that one call examines, in batches, the newest first."""
        seqs = islice(self._seqs(context, before), MOST_LOOKED_AT)
        ring, capacity = self._ring, self._capacity
        while some := [ring[seq % capacity] for seq in islice(seqs, _AT_ONCE)]:
            yield some

    def _seqs(self, context: str | None, before: int | None) -> Iterable[int]:
        newest = self._next if before is None else min(before, self._next)
        if context is None:
            return range(newest - 1, max(0, self._next - self._capacity) - 1, -1)
        kept = self._by_context.get(context, ())
        all_ = (kept,) if isinstance(kept, int) else kept
        return (seq for seq in reversed(all_) if seq < newest)

    def _row(self, seq: int) -> Row:
        return self._ring[seq % self._capacity]

    def _entry(self, seq: int) -> Entry:
        return Entry(self._row(seq), self._made.get(seq))

    def _add(self, id_: str, context: str, now_s: float) -> Row:
        seq = self._next
        place = seq % self._capacity
        row: Row = (id_, seq, context, "pending", now_s, None, None, None)
        if place == len(self._ring):
            self._ring.append(row)
        else:
            self._forget(self._ring[place])
            self._ring[place] = row
        self._next += 1
        self._seq_by_id[id_] = seq
        for key in _keys(context):
            kept = self._by_context.get(key)
            if kept is None:
                self._by_context[key] = seq
            elif isinstance(kept, deque):
                kept.append(seq)
            else:
                some = (kept, seq) if isinstance(kept, int) else (*kept, seq)
                self._by_context[key] = some if len(some) <= _FEW else deque(some)
        return row

    def _set_aside(self, row: Row) -> None:
        del self._seq_by_id[row[0]]
        id_ = f"{row[0]}.{row[1]}"
        self._ring[row[1] % self._capacity] = (id_, *row[1:])
        self._seq_by_id[id_] = row[1]

    def _forget(self, row: Row) -> None:
        if not row[0]:
            return
        del self._seq_by_id[row[0]]
        if (made := self._made.pop(row[1], None)) is not None:
            self._seq_by_handle.pop((made.agent, made.handle), None)
            if (made_id := self._made_ids.pop(row[1], None)) is not None:
                del self._seq_by_id[made_id]
        for key in _keys(row[2]):
            kept = self._by_context[key]
            if isinstance(kept, deque) and len(kept) > 1:
                kept.remove(row[1])  # the first, unless it was joined to another
            elif isinstance(kept, tuple) and len(kept) > 1:
                self._by_context[key] = tuple(seq for seq in kept if seq != row[1])
            else:
                del self._by_context[key]


def _outcome(row: Row, place: int, told: str) -> str:
    """Returns the outcome of a transfer after the report of one more end.

    The destination knows whether the bytes arrived; a failed source does not. If one end cancels, the other
    end fails.
    """
    before = row[3]
    other = row[_DESTINATION if place == _SOURCE else _SOURCE]
    if other is None:
        return told
    destination = before if place == _SOURCE else told
    return "cancelled" if destination != "done" and "cancelled" in (before, told) else destination


def _keys(context: str) -> tuple[str, ...]:
    """Returns the keys by which a context is found: all of it, its trace id, the part before that."""
    if not context:
        return ()
    found = TRACE_PARENT.search(context)
    if found is None:
        return (context,)
    before = context[: found.start()].rstrip()
    return tuple({key: None for key in (context, found[1], before) if key})
