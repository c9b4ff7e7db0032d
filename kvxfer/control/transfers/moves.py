"""Transfers that are made by REST, and queries about all transfers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from kvxfer.control import schema
from kvxfer.control.agents.agent_dials import AgentDials
from kvxfer.control.agents.agent_errors import AgentGone, CallRefused
from kvxfer.control.agents.agent_view import AgentView
from kvxfer.control.agents.attached import Attached
from kvxfer.control.agents.drains import Drains
from kvxfer.control.agents.end_names import EndNames
from kvxfer.control.schema.problems import Refusal
from kvxfer.control.state.event_log import EventLog
from kvxfer.control.state.rates import OpenCounts
from kvxfer.control.state.tokens import Caller
from kvxfer.control.state.transfer_table import (
    End,
    Entry,
    Filter,
    Made,
    TransferTable,
    id_of,
)
from kvxfer.control.transfers.tenant_gate import TenantGate
from kvxfer.control.transfers.transfer_view import TransferView
from kvxfer.session.records import Record

#: Running transfers that were made here: of each caller, and of all together.
MOST_EACH: Final = 256
MOST: Final = 4096
# For an agent to say what it has open.
_OPEN_TIMEOUT_S: Final = 2.0
_MOST_OPEN: Final = 1024
# For connecting, if needed, and posting.
_POST_TIMEOUT_S: Final = 15.0
# After its deadline a transfer drains, and then its record arrives.
_GRACE_S: Final = 60.0


class Moves:
    """Makes, cancels, lists and awaits transfers."""

    def __init__(
        self,
        table: TransferTable,
        agents: AgentView,
        drains: Drains,
        events: EventLog,
        dials: AgentDials,
        gate: TenantGate,
        clock: Callable[[], float],
    ) -> None:
        self._table = table
        self._view = TransferView(agents.region_name)
        self._agents = agents
        self._drains = drains
        self._events = events
        self._dials = dials
        self._gate = gate
        self._clock = clock
        self._counts = OpenCounts(MOST_EACH, MOST)
        # By the numbers that the transfers have in the table.
        self._running: dict[int, Made] = {}
        self._waiters: dict[int, set[asyncio.Event]] = {}
        drains.count_running = self.count_running

    def count_running(self) -> int:
        """Returns how many transfers that were made here are running."""
        self.sweep()
        return self._counts.total

    async def create(self, asked: schema.TransferRequest, caller: Caller) -> schema.Transfer:
        """Has an agent post a transfer; returns when it is posted."""
        self._drains.require_open()
        self.sweep()
        if len(asked.src_blocks) != len(asked.dst_blocks):
            raise Refusal(
                "length-mismatch",
                f"{len(asked.src_blocks)} src_blocks, but {len(asked.dst_blocks)} dst_blocks",
            )
        layers = _named_layers(asked.layers)
        agent = self._agents.find(asked.agent)
        self._dials.arguments_of(asked.remote_agent, agent)  # refuses a forbidden address before the wait
        nbytes = self._agents.blocks_nbytes(agent.incarnation, asked.region, len(asked.src_blocks))
        left_s = await self._gate.enter(asked.tenant, nbytes, asked.timeout_s)
        self._drains.require_open()  # a drain may have begun during the wait
        if not self._counts.enter(caller.key):
            raise Refusal(
                "exhausted", f"{MOST_EACH} transfers of {caller.name} (or {MOST} of all) are under way"
            )
        try:
            args = asked.model_dump(exclude={"agent", "verb", "tenant"}, exclude_none=True)
            args |= self._dials.arguments_of(asked.remote_agent, agent)
            args["timeout_s"] = left_s
            if layers is not None:
                args["layers"] = layers
            with self._table.making(agent.incarnation):
                told = await self._agents.call(agent, f"move.{asked.verb}", args, _POST_TIMEOUT_S)
                entry = self._made(asked, agent, told["handle"], caller)
        except BaseException:
            self._counts.leave(caller.key)
            raise
        return self._view.one(entry)

    def _made(self, asked: schema.TransferRequest, agent: Attached, handle: int, caller: Caller) -> Entry:
        now_s = self._clock()
        made = Made(
            agent=agent.incarnation,
            handle=handle,
            by=caller.name,
            caller_key=caller.key,
            tenant=asked.tenant,
            context=asked.context,
            priority=asked.priority,
            num_blocks=len(asked.src_blocks),
            until_s=time.monotonic() + asked.timeout_s + _GRACE_S,
        )
        entry = self._table.add_made(made, now_s)
        self._running[entry.seq] = made
        data = {"id": entry.id, "agent": agent.incarnation, "name": agent.name, "context": asked.context}
        self._events.append("transfers.created", now_s, data, asked.tenant)
        self._events.wake()
        self.on_ended(entry.seq)  # its record may have arrived already
        return entry

    @staticmethod
    def _peer_of(agent: Attached, session: int) -> str:
        """Returns the incarnation of a session's peer; ``""`` if it was not reported yet."""
        for peer in agent.peers:
            if peer["session"] == session:
                return str(peer["incarnation"])
        return ""

    def on_ended(self, seq: int) -> str:
        """Notes that an end of a transfer may have ended; returns the transfer's tenant."""
        made = self._running.get(seq)
        if made is None and seq not in self._waiters:
            return self._table.tenant_of(seq)
        entry = self._table.at(seq)
        if entry is None or entry.outcome != "pending":
            if made is not None:
                del self._running[seq]
                self._counts.leave(made.caller_key)
                self._drains.look()
            for event in self._waiters.get(seq, ()):
                event.set()
        return self._table.tenant_of(seq)

    def on_gone(self, agent: str) -> None:
        """Marks the running transfers of an agent that is gone as failed: it will report nothing more."""
        self._lose([seq for seq, made in self._running.items() if made.agent == agent])

    def sweep(self) -> None:
        """Marks transfers as failed that must have ended, but whose record was lost."""
        now_s = time.monotonic()  # the time of day may be set
        self._lose([seq for seq, made in self._running.items() if made.until_s < now_s])

    def _lose(self, seqs: Iterable[int]) -> None:
        for seq in seqs:
            self._table.fail(seq, self._clock())
            self.on_ended(seq)

    async def get(self, id_: str, caller: Caller, wait_s: float) -> schema.Transfer:
        """Returns a transfer; if it is pending, waits up to `wait_s` for its end."""
        entry = self._entry(id_, caller)
        if entry is None:
            agent, record = await self._find_open(id_, caller)
            entry = self._entry(id_, caller)
            told = (id_, self._end(agent, record, _names(agent)), None if entry is None else entry.made)
            return self._view.open([told], self._clock(), 1).items[0]
        if wait_s and entry.outcome == "pending":
            ended = asyncio.Event()
            waiters = self._waiters.setdefault(entry.seq, set())
            waiters.add(ended)
            try:
                await asyncio.wait_for(ended.wait(), wait_s)
            except TimeoutError:
                pass
            finally:
                waiters.discard(ended)
                if not waiters:
                    self._waiters.pop(entry.seq, None)
            entry = self._table.at(entry.seq) or entry
        return await self._with_open_end(entry)

    async def _with_open_end(self, entry: Entry) -> schema.Transfer:
        """Returns a transfer; asks the agent for the stages if the transfer was made here and is open."""
        made = entry.made
        agent = None if made is None else self._agents.attached.get(made.agent)
        if made is None or agent is None or entry.outcome != "pending":
            return self._view.one(entry)
        (records,) = await self._ask_open([agent], _MOST_OPEN)
        entry = self._table.at(entry.seq) or entry
        for record in records:
            if record.handle == made.handle and entry.outcome == "pending":
                self._id_of(agent, record)  # sets the final id, if the session is known
                id_ = (self._table.at(entry.seq) or entry).id
                told = (id_, self._end(agent, record, _names(agent)), made)
                return self._view.open([told], self._clock(), 1).items[0]
        return self._view.one(entry)

    async def cancel(self, id_: str, caller: Caller) -> schema.Cancelled:
        """Cancels a transfer that was made here, or that is open at an attached agent."""
        entry = self._entry(id_, caller)
        args: dict[str, Any]
        if entry is not None and entry.made is not None:
            if entry.outcome != "pending":
                return schema.Cancelled(id=entry.id, found=False)
            agent = self._agents.find(entry.made.agent)
            args = {"handle": entry.made.handle}
        else:
            try:
                agent, record = await self._find_open(id_, caller)
            except Refusal:
                if entry is None:
                    raise
                return schema.Cancelled(id=entry.id, found=False)
            is_source = record.role == "source"
            args = {"session": record.session, "transfer": record.transfer, "is_source": is_source}
        told = await self._agents.call(agent, "move.cancel", args)
        return schema.Cancelled(id=id_ if entry is None else entry.id, found=bool(told.get("found")))

    def listed(
        self,
        caller: Caller,
        *,
        agent: str | None,
        state: str | None,
        context: str | None,
        tenant: str | None,
        since_s: float | None,
        cursor: str,
        limit: int,
    ) -> schema.Listed[schema.Transfer]:
        """Returns transfers, the newest first."""
        wanted = Filter(agent, state, context, tenant, caller.tenants, since_s)
        before = int(cursor) if cursor.isascii() and cursor.isdigit() and len(cursor) < 19 else None
        found, next_ = self._table.listed(wanted, before, limit)
        return self._view.page(found, None if next_ is None else str(next_))

    async def list_open(
        self, caller: Caller, agent: str | None, limit: int
    ) -> schema.Listed[schema.Transfer]:
        """Asks agents for their open transfers; leaves out those that do not answer, or may not."""
        if caller.tenants is not None:
            return schema.Listed[schema.Transfer](items=[])
        agents = self._agents.some(agent)
        told = []
        for each, records in zip(agents, await self._ask_open(agents, limit), strict=True):
            names = _names(each)
            for record in records:
                known = self._table.get(id_ := self._id_of(each, record))
                told.append((id_, self._end(each, record, names), None if known is None else known.made))
        return self._view.open(told, self._clock(), limit)

    async def _ask_open(self, agents: list[Attached], most: int) -> list[list[Record]]:
        async def ask(agent: Attached) -> list[Record]:
            try:
                return await self._agents.open_transfers(agent, most, _OPEN_TIMEOUT_S)
            except (CallRefused, AgentGone, TimeoutError):
                return []

        return await asyncio.gather(*(ask(agent) for agent in agents))

    async def _find_open(self, id_: str, caller: Caller) -> tuple[Attached, Record]:
        if caller.tenants is None:
            agents = [agent for agent in self._agents.all() if agent.incarnation[:16] in id_]
            for agent, records in zip(agents, await self._ask_open(agents, _MOST_OPEN), strict=True):
                for record in records:
                    if self._id_of(agent, record) == id_:
                        return agent, record
        raise Refusal("not-found", f"there is no transfer {id_!r} (any more)")

    def _id_of(self, agent: Attached, record: Record) -> str:
        peer = self._peer_of(agent, record.session)
        if not peer:  # the agent reports the session a moment later
            return id_of(record, agent.incarnation, f"session{record.session}")
        id_ = id_of(record, agent.incarnation, peer)
        self._table.know(id_, agent.incarnation, record)
        return id_

    @staticmethod
    def _end(agent: Attached, record: Record, names: EndNames) -> End:
        return End(agent.incarnation, agent.name, agent.clock_offset_ns, record, names.of(record))

    def _entry(self, id_: str, caller: Caller) -> Entry | None:
        entry = self._table.get(id_)
        return entry if entry is not None and caller.sees(entry.tenant) else None


def _named_layers(span: list[int] | None) -> list[int] | None:
    """Returns the layers of a request's span, one by one, as agents of every version take them."""
    if span is None:
        return None
    first, stop = span
    if first >= stop:
        raise Refusal(
            "out-of-range", f"layers {span} name none: write [first, stop], e.g. [0, 1] for layer 0"
        )
    return list(range(first, stop))


def _names(agent: Attached) -> EndNames:
    found = EndNames()
    found.learn(agent)
    return found
