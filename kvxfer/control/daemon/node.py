"""The daemon's parts, put together. HTTP uses this module, which knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import kvxfer
from kvxfer.allowed_hosts import AllowedHosts
from kvxfer.control import schema
from kvxfer.control.agents.agent_dials import AgentDials
from kvxfer.control.agents.agent_links import AgentLinks
from kvxfer.control.agents.agent_view import AgentView
from kvxfer.control.agents.arrival_log import ArrivalLog
from kvxfer.control.agents.attached import Attached
from kvxfer.control.agents.drains import Drains
from kvxfer.control.agents.grants import Grants
from kvxfer.control.agents.intake import Intake, event_of_end
from kvxfer.control.daemon.audit_log import AuditLog
from kvxfer.control.daemon.durable_tokens import DurableTokens
from kvxfer.control.daemon.live_settings import LiveSettings
from kvxfer.control.daemon.names import Names
from kvxfer.control.daemon.standing_reasons import StandingReasons
from kvxfer.control.http.shown_certificates import ShownCertificates
from kvxfer.control.schema.problems import Refusal
from kvxfer.control.state.answers import Answers
from kvxfer.control.state.event_log import RESERVE, EventLog
from kvxfer.control.state.own_files import own_folder
from kvxfer.control.state.reserve import Reserve
from kvxfer.control.state.span_table import SpanTable
from kvxfer.control.state.store import Store, number
from kvxfer.control.state.transfer_counts import TransferCounts
from kvxfer.control.state.transfer_table import CAPACITY, End, TransferTable
from kvxfer.control.traces.request_trace import RequestTraces
from kvxfer.control.traces.spans import Spans
from kvxfer.control.transfers.failure_log import FailureLog
from kvxfer.control.transfers.moves import Moves
from kvxfer.control.transfers.tenant_gate import TenantGate
from kvxfer.errors import KvxferError, UsageError
from kvxfer.log import logger

if TYPE_CHECKING:
    from kvxfer.control.handed.handed_memory import Handed, HandedMemory
    from kvxfer.control.host_pool.page import PageKey
    from kvxfer.control.host_pool.page_desk import PageDesk
    from kvxfer.control.host_pool.page_pool import PagePool
    from kvxfer.control.own.own_agent import OwnAgent

# An examination keeps a thread busy for up to two seconds.
_DOCTOR_KEPT_S: Final = 10.0
_MOST_DOCTORS: Final = 16


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Options of a daemon.

    Attributes
    ----------
    node
        The daemon's name, unique among daemons that meet.
    state
        The folder of durable state (0700): store, audit log, admin's token.
    runtime
        The folder of its sockets (0700), where agents look for the daemon.
    allow
        Hosts that requests may make it dial (`kvxfer.allowed_hosts`).
    require
        Transports that must work for the daemon to be ready.
    most_transfers
        How many records of transfers are kept; some 800 bytes each.
    tokens
        As for `DurableTokens`.
    """

    node: str
    state: Path
    runtime: Path
    allow: AllowedHosts
    require: tuple[str, ...] = ()
    most_transfers: int = CAPACITY
    tokens: tuple[tuple[str, Path], ...] = ()


class NodeDaemon:
    """All that the daemon knows and does. Make it, call `start`, serve, and call `aclose` at the end.

    Everything except the store's thread runs on one event loop.

    Raises
    ------
    OSError, RuntimeError
        The state folder cannot be used.
    """

    def __init__(self, options: NodeOptions, clock: Callable[[], float] = time.time) -> None:
        self.options = options
        self.clock = clock
        self.incarnation = secrets.token_hex(8)
        self.started_at_s = clock()
        self.allowed = options.allow
        self.own: OwnAgent | None = None
        #: Whether its own agent is being made.
        self.makes_own = False
        #: Sends ends of transfers as spans; set before `start`.
        self.spans: Spans | None = None
        self.pages: PageDesk | None = None
        self._pool: PagePool | None = None
        self._memory: HandedMemory | None = None
        own_folder(options.state)
        #: Room on the state's disk for revoking and draining.
        self.reserve = Reserve(options.state / "reserve")
        self.reserve.take()
        self.store = Store(options.state / "daemon.sqlite", self.reserve)
        self.store.begin_life()
        self.audit = AuditLog(options.state / "audit.log", reserve=self.reserve)
        #: Why it refuses work; `serve` begins its log.
        self.standing = StandingReasons(self._standing)
        self.audit.on_refused = self.standing.look
        self._reserved = max(1, int(self.store.load("node", number).get("events", 1)))
        self.events = EventLog(self._reserved, make=event_of_end)
        self.counts = TransferCounts()
        self.failures = FailureLog()
        self.arrivals = ArrivalLog()
        self.certificates = ShownCertificates()
        self.table = TransferTable(options.most_transfers)
        #: Spans that engines and routers have sent.
        self.engine_spans = SpanTable()
        self.traces = RequestTraces(self.table, self.engine_spans)
        self.links = AgentLinks(options.runtime, on_records=self._on_records, on_change=self._on_change)
        self.agents = AgentView(self.links)
        self.tokens = DurableTokens(self.store, options.state / "admin.token", clock, options.tokens)
        self.answers = Answers(self.store)
        self.drains = Drains(self.store, self.agents, self.note, clock)
        self.gate = TenantGate()
        self.dials = AgentDials(self.agents, self.drains, options.allow)
        self.moves = Moves(self.table, self.agents, self.drains, self.events, self.dials, self.gate, clock)
        self.grants = Grants(self.agents, self.drains, self.note)
        self.intake = Intake(self.table, self.counts, self.events, clock, self.moves.on_ended, self._on_end)
        self.settings = LiveSettings(
            self.store, self.agents, self.note, self._set_quotas, self.gate.set_rates
        )
        self.names = Names(self.store, self.note, lambda: self.events.last)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._doctors: dict[tuple[str, ...], tuple[float, asyncio.Task[schema.Doctor]]] = {}
        self._missing: tuple[str, ...] | None = None
        self._keeping_index = False
        self._index_complaint = ""

    async def start(self) -> None:
        """Lets agents attach, and makes the first token if there is none."""
        await self._keep_index()
        await self.tokens.start()
        await self.links.start()
        self.names.load()
        self._spawn(self.names.forget_ended())
        self._missing = await asyncio.to_thread(_lacking, self.options.require)

    def add_own(self, own: OwnAgent, pool: PagePool | None) -> None:
        """Adds the daemon's own agent, and its pool if it has one; `aclose` closes them."""
        self.own, self._pool = own, pool
        own.leases.on_expired = lambda: self.intake.lease_counts.note_expired(own.incarnation)
        self.makes_own = False
        if pool is not None:
            from kvxfer.control.host_pool.page_desk import PageDesk

            self.pages = PageDesk(pool, self.store, self.allowed, self.gate, self.agents)
            self.settings.take_effect()

    async def add_memory(self, gpu: int | None = None) -> None:
        """Lets processes hand memory to its own agent, also memory of a GPU if one is named."""
        assert self.own is not None
        from kvxfer.control.handed.handed_memory import HandedMemory

        self._memory = HandedMemory(self.options.runtime, self.own, gpu=gpu, on_change=self._on_memory)
        await self._memory.start()

    def _on_memory(self, handed: Handed, came: bool) -> None:
        data = {"region": handed.name, "pid": handed.pid, "nbytes": handed.nbytes}
        self.note("memory.handed" if came else "memory.gone", data)

    async def on_parked(self, keys: list[PageKey]) -> None:
        """Stores the keys of pages before the pages are acknowledged."""
        await self.store.add_parked([key.digest() for key in keys])

    def on_dropped(self, keys: list[PageKey], why: str) -> None:
        """Forgets the keys of pages that are gone."""
        self.store.drop_parked([key.digest() for key in keys])
        if why == "evicted":
            for tenant in {key.tenant for key in keys}:
                count = sum(key.tenant == tenant for key in keys)
                self.note("pages.evicted", {"tenant": tenant, "keys": count}, tenant)

    def on_files_evicted(self, digests: list[bytes]) -> None:
        """Forgets pages that files had to make room for."""
        self.store.drop_parked(digests)

    def on_files_state(self, state: str, why: str) -> None:
        """Tells watchers that the pages' disk went out, or came back."""
        self.note("pages.files", {"state": state, "why": why})

    async def end_own(self) -> None:
        """Ends its own agents, while REST still answers: their directory may be this daemon's. Idempotent."""
        for part in (self._memory, self._pool, self.own):
            if part is None:
                continue
            try:
                await part.aclose()
            except (KvxferError, OSError) as error:  # of a directory: an entry stays until its time is over
                logger().warning("%s", error)

    async def aclose(self) -> None:
        """Ends all parts; agents go on without the daemon. Idempotent."""
        for task in self._tasks:
            task.cancel()
        self.arrivals.close()
        await self.end_own()
        await self.links.aclose()
        self.failures.close()
        try:
            await self.store.put("node", "events", self.events.last + 1)
        except Refusal as error:
            logger().warning("%s", error)
        if self.spans is not None:
            await asyncio.to_thread(self.spans.close)
        await asyncio.to_thread(self.store.close)
        self.audit.close()

    # ---- events ------------------------------------------------------------------------------------

    def note(self, topic: str, data: Mapping[str, Any], tenant: str | None = None) -> None:
        """Adds one event, and wakes the watchers."""
        self.events.append(topic, self.clock(), data, tenant)
        self.events.wake()
        self._look_at_index()

    def _on_end(self, transfer: str, end: End) -> None:
        self.failures.add(transfer, end)
        if self.spans is not None:
            self.spans.add(transfer, end)

    def _on_records(self, agent: Attached, records: list[Any]) -> None:
        self.intake.records(agent, records)
        self._look_at_index()

    def _on_change(self, agent: Attached, what: frozenset[str]) -> None:
        self.intake.changed(agent, what)
        if "attached" in what:
            self.arrivals.attached(agent)
            self._spawn(self.settings.tell_new(agent))
        if "gone" in what:
            self.arrivals.gone(agent)
            self.moves.on_gone(agent.incarnation)
        elif "attached" in what if self.drains.draining else agent.draining and "draining" in what:
            # The agent drains although the node does not: it missed the end of the drain, e.g. because the
            # daemon was killed after it had stored that end, and before it told the agents.
            self._spawn(self.drains.tell_new(agent))
        if self.drains.draining:
            self.drains.look()
        self._look_at_index()

    def _look_at_index(self) -> None:
        """Reserves more indexes before they are used up."""
        if self.events.last + RESERVE // 2 > self._reserved and not self._keeping_index:
            self._keeping_index = True
            self._spawn(self._keep_index())

    async def _keep_index(self) -> None:
        try:
            reserved = self.events.last + 1 + RESERVE
            await self.store.put("node", "events", reserved)
            self._reserved = reserved
            self._index_complaint = ""
        except Refusal as error:
            words = f"event indexes could not be reserved, and may repeat after a crash: {error}"
            if words != self._index_complaint:
                logger().warning("%s", words)
            self._index_complaint = words
            await asyncio.sleep(1)
        finally:
            self._keeping_index = False

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _set_quotas(self, before: Any, quotas: Mapping[str, int]) -> None:
        if self.pages is not None:
            self.pages.set_quotas(before, quotas)

    # ---- state -------------------------------------------------------------------------------------

    def shown(self) -> schema.Node:
        """Returns the description of this daemon."""
        return schema.Node(
            node=self.options.node,
            incarnation=self.incarnation,
            version=kvxfer.__version__,
            agent=None if self.own is None else self.own.incarnation,
            address="" if self.own is None else self.own.address,
            started_at_s=self.started_at_s,
            draining=self.drains.draining,
        )

    def readiness(self) -> schema.Readiness:
        """Returns whether it takes work, and if not, why; at once, from what it knows."""
        reasons = [words for each in self.standing.look().values() for words in each]
        if self.store.fault and not self._keeping_index:
            # Only a successful write shows that the store can be written again, and while the daemon is not
            # ready, nobody may ask for one.
            self._keeping_index = True
            self._spawn(self._keep_index())
        return schema.Readiness(ready=not reasons, reasons=reasons)

    def _standing(self) -> dict[str, list[str]]:
        reasons: dict[str, list[str]] = {}
        if self.drains.ends:
            reasons["stopping"] = ["it is stopping"]
        if self.drains.draining:
            reasons["draining"] = ["it is draining"]
        if self.store.fault:
            reasons["store"] = [f"the store cannot be written: {self.store.fault}"]
        if fault := self.audit.fault:
            reasons["audit-log"] = [fault]
        if self._missing is None or self.makes_own:
            reasons["starting"] = ["it is starting"]
        if self._missing:
            reasons["transport"] = list(self._missing)
        if self.own is not None and self.own.agent.closed and not self.drains.ends:
            reasons["agent"] = [f"{self.own.name} has ended: start the daemon again"]
        elif self.own is not None and not self.own.address:
            reasons["agent"] = [f"{self.own.name} has no address at which others reach it"]
        return reasons

    async def topology(self) -> schema.Topology:
        """Returns the machine, its agents, and their sessions with their rails."""
        doctor = await self.doctor(())
        links = [
            schema.Link(
                source=agent.incarnation, destination=peer["incarnation"], rails=list(peer.get("rails", ()))
            )
            for agent in self.agents.all()
            for peer in agent.peers
        ]
        return schema.Topology(
            machine=doctor.machine, agents=[agent.incarnation for agent in self.agents.all()], links=links
        )

    async def doctor(self, require: tuple[str, ...]) -> schema.Doctor:
        """Examines the machine in a thread; all callers share the result for ten seconds."""
        require = tuple(sorted(set(require)))
        now_s = time.monotonic()
        kept = self._doctors.get(require)
        if kept is None or (kept[1].done() and now_s - kept[0] > _DOCTOR_KEPT_S):
            if sum(not task.done() for _, task in self._doctors.values()) >= 2:
                raise Refusal("exhausted", "two examinations are under way", retry_after_s=2)
            if len(self._doctors) >= _MOST_DOCTORS:
                self._doctors.clear()
            task = asyncio.ensure_future(asyncio.to_thread(_examine, require))
            kept = self._doctors[require] = (now_s, task)
        return await asyncio.shield(kept[1])


def _examine(require: tuple[str, ...]) -> schema.Doctor:
    from kvxfer.doctor.report import examine

    try:
        return schema.Doctor.model_validate(examine(require).to_dict())
    except UsageError as error:
        raise Refusal("not-found", str(error)) from None


def _lacking(require: tuple[str, ...]) -> tuple[str, ...]:
    """Returns in words which required transports are missing."""
    if not require:
        return ()
    from kvxfer.doctor.available_transports import check_names
    from kvxfer.session.transport_registry import kinds

    check_names(require)
    known = kinds()
    why = {name: known[name].why_off if name in known else "not built in" for name in require}
    return tuple(f"transport {name} is required: {words}" for name, words in why.items() if words)
