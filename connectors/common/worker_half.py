"""The worker half of a connector: owns the worker's agent, its regions and all transfers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

import kvxfer
from kvxfer.connectors.common import notes
from kvxfer.connectors.common.compute_stream import ComputeStream
from kvxfer.connectors.common.fetches import Fetches
from kvxfer.connectors.common.heartbeats import Heartbeats
from kvxfer.connectors.common.kept_blocks import KeptBlocks
from kvxfer.connectors.common.mail import Mail
from kvxfer.connectors.common.prefill_ranks import PrefillRanks
from kvxfer.connectors.common.pushes import Pushes
from kvxfer.connectors.common.regions import STARTING, CacheMemory, CacheRegions
from kvxfer.connectors.common.settings import Settings
from kvxfer.connectors.common.statistics import Counts, Recorder
from kvxfer.connectors.common.step import News, OwnRank, Step
from kvxfer.connectors.common.worker_rank import WorkerRank

_log = logging.getLogger("kvxfer")

# While a forward waits for a layer, because prefill may send a refusal.
_READ_NOTES_EVERY_S: Final = 0.05
# How long an idle step waits for news; a new request may wait so long for its first step.
_REST_S: Final = 0.002


@dataclass(frozen=True, slots=True)
class StepResults:
    """The requests that have ended since the last step.

    Attributes
    ----------
    sent
        Requests whose blocks were fetched or pushed, or whose time is over.
    received
        Requests whose fetch has ended, including those that failed.
    failed
        Requests whose fetch failed, with the blocks of the first group that lack bytes.
    """

    sent: set[str]
    received: set[str]
    failed: dict[str, set[int]]


class WorkerHalf:
    """Transfers this worker's share of the caches that its engine hands over and takes over."""

    def __init__(
        self,
        position: WorkerRank,
        settings: Settings,
        stream: ComputeStream | None = None,
    ) -> None:
        self._position = position
        self._settings = settings
        self._stream = stream
        self._agent = _agent(position, settings)
        self._starting: kvxfer.Region | None = self._agent.register(STARTING, np.zeros((1, 1), np.uint8))
        self._mail = Mail(self._agent)
        self._statistics = Recorder()
        self._kept = KeptBlocks(settings.lease_ttl_s, settings.return_ttl_s, self._statistics)
        self._ranks = PrefillRanks(self._agent, settings.connect_timeout_s)
        self._heartbeats = Heartbeats(self._ranks, self._mail, settings.lease_ttl_s)
        self._regions: CacheRegions | None = None
        self._fetches: Fetches | None = None
        self._pushes: Pushes | None = None

    def register(self, memory: Sequence[CacheMemory]) -> None:
        """Registers the engine's caches, once they exist: all on its position's GPU, or in host memory."""
        if self._settings.huge_pages and self._position.gpu is None:
            kvxfer.use_huge_pages([each.tensors for each in memory])
        self._regions = CacheRegions(self._agent, memory)
        self._fetches = Fetches(
            self._agent,
            self._regions,
            self._mail,
            self._ranks,
            self._position,
            self._settings,
            self._statistics,
            self._stream,
        )
        self._pushes = Pushes(
            self._agent, self._regions, self._mail, self._settings, self._statistics, self._stream
        )

    @property
    def rank(self) -> OwnRank:
        """This worker's agent, as other engines reach it."""
        assert self._regions is not None, "the engine asks before it has registered its caches"
        pages_per_block = tuple(
            pages
            for group, pages in zip(self._regions.groups, self._regions.pages_per_block, strict=True)
            if not group.shape
        )
        return OwnRank(self._agent.entry, pages_per_block)

    # ---- the parts of a step ----------------------------------------------------------------

    def before_forward(self, step: Step) -> None:
        """Stops transfers from blocks that this step's forward may overwrite, and posts its pushes.

        Returns at once, unless a peer is reading blocks that the forward needs now.
        """
        assert self._pushes is not None, "the engine steps before it has registered its caches"
        self._read_notes()
        for request_id in step.withdrawn:
            self._kept.withdraw(request_id)
            self._pushes.withdraw(request_id)
        for request_id in step.preempted:
            self._pushes.preempt(request_id)
        for request_id in step.given_way:
            self._kept.give_way(request_id)
            self._pushes.give_way(request_id)
        for remainder in step.remainders:
            self._pushes.shrink(remainder)
        self._kept.settle()
        self._pushes.settle()
        for chunk in step.chunks:
            self._pushes.begin(chunk)

    def wait_for_layer(self, layer_name: str) -> None:
        """Waits until a layer of every cache that this step's forward loads is here, or has failed."""
        assert self._fetches is not None
        while not self._fetches.wait_for_layer(layer_name, _READ_NOTES_EVERY_S):
            self._read_notes()

    def layer_done(self, layer_name: str) -> None:
        """Releases one layer that this step has computed."""
        assert self._pushes is not None
        if self._pushes.are_computed:
            self._read_notes()
            self._pushes.layer_done(layer_name)

    def step(self, step: Step) -> None:
        """Carries out the scheduler half's orders. Returns at once."""
        assert self._regions is not None, "the engine steps before it has registered its caches"
        assert self._fetches is not None
        for grant in step.grants:
            self._kept.grant(grant, self._regions)
        for order in step.fetches:
            self._fetches.begin(order)
        for request_id in step.abandoned:
            self._fetches.abandon(request_id)
        for claimed in step.claimed if self._position.rank == 0 else ():
            self._heartbeats.begin(claimed)
        for request_id in step.unclaimed:
            self._heartbeats.end(request_id)
        for source in step.released:
            note = self._fetches.release(source)
            if isinstance(note, notes.Receipt) and self._agent.name in {rank.name for rank in source.ranks}:
                self._kept.note(note, self._agent.name, is_own=True)

    def after_forward(self, whole: bool) -> None:
        """Releases all layers that this step has computed, unless its forward failed (not `whole`)."""
        assert self._pushes is not None
        self._pushes.step_done(whole)

    def collect(self, finished_request_ids: set[str], num_running: int = 1) -> StepResults:
        """Returns the requests that have ended, each once.

        Waits for caches that this step has begun to fetch, if the wait gains more than it costs the running
        requests. An engine with nothing to compute calls this again and again; its processes would take two
        cores from the processes that compute the prompt it waits for. So with no running request and nothing
        ended, this waits a moment for news.
        """
        assert self._fetches is not None
        self._fetches.linger(num_running)
        results = self._collect(finished_request_ids)
        if not num_running and not (results.sent or results.received or results.failed) and self._rest():
            return self._collect(set())
        return results

    def _collect(self, finished_request_ids: set[str]) -> StepResults:
        assert self._fetches is not None
        assert self._pushes is not None
        self._read_notes()
        self._heartbeats.beat()
        sent = self._kept.collect(finished_request_ids) | self._pushes.collect(finished_request_ids)
        received, failed = self._fetches.collect()
        return StepResults(sent, received, failed)

    def _rest(self) -> bool:
        """Waits a moment for news; returns whether any can come."""
        assert self._fetches is not None
        assert self._pushes is not None
        if self._fetches.rest(_REST_S):
            return True
        if not self._kept and not self._pushes and not self._heartbeats:
            return False
        self._read_notes(_REST_S)
        return True

    def _read_notes(self, timeout_s: float = 0.0) -> None:
        if self._starting is not None:
            self._starting.deregister_blocking()
            self._starting = None
        self._mail.flush()
        for peer, note in self._mail.receive(timeout_s):
            try:
                self._process(peer, note)
            except kvxfer.AgentError:
                raise
            except Exception:
                # Input from another engine must not end this engine.
                _log.exception("kvxfer: a note from %s could not be processed", peer.name)

    def _process(self, peer: kvxfer.Peer, note: notes.Note) -> None:
        assert self._fetches is not None
        assert self._pushes is not None
        match note:
            case notes.Receipt():
                self._kept.note(note, peer.name)
            case notes.Heartbeat():
                self._kept.claim(note, peer.name)
                self._pushes.claim(note.request, peer.name)
            case notes.Refusal():
                self._fetches.refused(note)
            case notes.RegistrationPart() | notes.Leaving():
                self._pushes.note(peer, note)

    def take_news(self) -> News | None:
        """Returns the news for the scheduler half since the last call; None if there are none."""
        news = self._kept.take_news()
        if self._pushes is not None:
            news |= self._pushes.take_news()
        return news or None

    def take_statistics(self) -> Counts | None:
        """Returns what was counted since the last call; None when nothing has happened."""
        return self._statistics.take()

    # ---- sleep ------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Ends all transfers and deregisters the caches, so that the engine may release their memory.

        The next `collect` returns running fetches as failed, and pushed or kept requests as given back.
        Idempotent.
        """
        if self._regions is None or self._fetches is None or self._pushes is None:
            return
        self._fetches.stop("the engine sleeps", "cancelled")
        self._pushes.let_go()
        self._kept.let_go()
        self._regions.deregister()

    def wake(self) -> None:
        """Registers the caches again after `sleep`. Idempotent.

        The sessions are still open: peers learn of the new regions, and transfers with the old ones fail.
        """
        if self._regions is not None:
            self._regions.register()

    # ---- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the agent and ends all transfers: when it returns, no byte lands in the engine's caches."""
        with ExitStack() as ending:  # each is closed, whatever another raises; the last one first
            ending.callback(self._agent.close)
            ending.callback(self._kept.close)
            ending.callback(self._ranks.close)
            if self._pushes is not None:
                ending.callback(self._pushes.close)
            if self._fetches is not None:
                ending.callback(self._fetches.close)


def _agent(position: WorkerRank, settings: Settings) -> kvxfer.Agent:
    # An engine whose cache differs is not fetched from, but is told that its blocks are not wanted.
    options = replace(settings.agent_options(position), refuse_unlike=False)
    try:
        return kvxfer.Agent(position.agent_name(), options)
    except kvxfer.KvxferError as error:
        error.add_note(f"The agent listens at the setting host, or KVXFER_HOST: {settings.host}")
        raise
