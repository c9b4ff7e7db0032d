"""Passes agents' reports on to tables, counts and events."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from kvxfer.control.agents.attached import Attached
from kvxfer.control.agents.end_names import EndNames
from kvxfer.control.state.event_log import EventLog
from kvxfer.control.state.lease_counts import LeaseCounts
from kvxfer.control.state.transfer_counts import TransferCounts
from kvxfer.control.state.transfer_table import End, PackedEnd, TransferTable, id_of, pack, unpack
from kvxfer.session.records import Record

# A record may arrive before its session is reported, which agents do at most twice a second.
_PATIENCE_S: Final = 2.0
_MOST_HELD: Final = 10_000
_MOST_LEASES: Final = 65536


@dataclass(slots=True)
class _Known:
    """What one agent has reported."""

    names: EndNames = field(default_factory=EndNames)
    held: list[tuple[float, Record]] = field(default_factory=list)
    leases: dict[str, str] = field(default_factory=dict)
    records_dropped: int = 0


class Intake:
    """Receives the callbacks of `AgentLinks`.

    Parameters
    ----------
    on_ended
        Called with the number of each transfer that has an end which has ended; returns the tenant.
    on_end
        Called with the transfer's id, and the end.
    """

    def __init__(
        self,
        table: TransferTable,
        counts: TransferCounts,
        events: EventLog,
        clock: Callable[[], float],
        on_ended: Callable[[int], str],
        on_end: Callable[[str, End], None],
    ) -> None:
        self._table = table
        self._counts = counts
        self._events = events
        self._clock = clock
        self._on_ended = on_ended
        self._on_end = on_end
        self._known: dict[str, _Known] = {}
        #: Records that were lost on their way to the daemon.
        self.records_dropped = 0
        #: How leases of agents ended.
        self.lease_counts = LeaseCounts()

    def records(self, agent: Attached, records: Iterable[Record]) -> None:
        """Receives records of ended transfers and expectations."""
        now_s = self._clock()
        known = self._of(agent)
        for record in records:
            if record.session and not known.names.peer(record.session) and len(known.held) < _MOST_HELD:
                known.held.append((now_s, record))
            else:
                self._take(agent, known, record, now_s)
        if known.held:
            self._let_in(agent, known, now_s)
        self._events.wake()

    def changed(self, agent: Attached, what: frozenset[str]) -> None:
        """Receives what has changed about an agent."""
        now_s = self._clock()
        known = self._of(agent)
        data = {"agent": agent.incarnation, "name": agent.name}
        if "attached" in what:
            self._events.append(
                "agents.attached", now_s, {**data, "pid": agent.pid, "version": agent.version}
            )
        if what & {"attached", "peers", "regions"}:
            known.names.learn(agent)
            self._let_in(agent, known, now_s)
        if what & {"attached", "leases", "gone"}:
            self._compare_leases(agent, known, now_s, gone="gone" in what)
        if "leases_ended" in what:
            self.lease_counts.take(agent.incarnation, agent.leases_ended)
        self.records_dropped += max(0, agent.records_dropped - known.records_dropped)
        known.records_dropped = agent.records_dropped
        if "gone" in what:
            for _, record in known.held:
                self._take(agent, known, record, now_s)
            del self._known[agent.incarnation]
            self._events.append("agents.gone", now_s, data)
        elif sections := sorted(what - {"attached", "stats", "leases_ended"}):
            self._events.append("agents.changed", now_s, {**data, "sections": sections})
        self._events.wake()

    # ---- inside ------------------------------------------------------------------------------------

    def _of(self, agent: Attached) -> _Known:
        if (known := self._known.get(agent.incarnation)) is None:
            known = self._known[agent.incarnation] = _Known()
            known.records_dropped = agent.records_dropped
            known.names.learn(agent)
        return known

    def _let_in(self, agent: Attached, known: _Known, now_s: float) -> None:
        """Adds records whose session is known now, or that have waited for too long."""
        held, known.held = known.held, []
        for since_s, record in held:
            if known.names.peer(record.session) or now_s - since_s > _PATIENCE_S:
                self._take(agent, known, record, now_s)
            else:
                known.held.append((since_s, record))

    def _take(self, agent: Attached, known: _Known, record: Record, now_s: float) -> None:
        peer = known.names.peer(record.session) or f"session{record.session}"
        id_ = id_of(record, agent.incarnation, peer)
        end = End(agent.incarnation, agent.name, agent.clock_offset_ns, record, known.names.of(record))
        self._counts.add(record, id_, now_s)
        packed = pack(end)
        seq = self._table.add_end(id_, end, packed, now_s)
        tenant = self._on_ended(seq)
        self._on_end(id_, end)
        kept = id_, self._table.made_id_of(seq), packed
        self._events.append_packed(_TOPICS[record.outcome], now_s, kept, tenant)

    def _compare_leases(self, agent: Attached, known: _Known, now_s: float, *, gone: bool) -> None:
        now = {} if gone else {str(lease["lease"]): lease["state"] for lease in agent.leases[:_MOST_LEASES]}
        data = {"agent": agent.incarnation, "name": agent.name}
        if granted := len(now.keys() - known.leases.keys()):
            self._events.append("leases.granted", now_s, {**data, "leases": granted})
        if ended := len(known.leases.keys() - now.keys()):
            self._events.append("leases.ended", now_s, {**data, "leases": ended})
        known.leases = now


_TOPICS: Final = {outcome: f"transfers.{outcome}" for outcome in ("pending", "done", "failed", "cancelled")}


def event_of_end(kept: tuple[str, str | None, PackedEnd]) -> dict[str, Any]:
    """Returns the data of an event about an end."""
    id_, made_id, packed = kept
    end = unpack(packed)
    record = end.record
    return {
        "id": id_,
        "made_id": made_id,
        "agent": end.agent,
        "name": end.agent_name,
        "peer": end.peer,
        "peer_name": end.peer_name,
        "role": record.role,
        "outcome": record.outcome,
        "code": record.code,
        "nbytes": record.nbytes,
        "rails": list(record.rails),
        "context": record.context,
        "total_us": (record.ended_ns - record.posted_ns) / 1e3 if record.posted_ns else None,
    }
