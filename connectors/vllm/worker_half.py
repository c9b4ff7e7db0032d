"""The half of the connector beside each worker: has the agent, the regions and all that moves."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import kvxfer
from kvxfer.connectors.vllm.cache_groups import CacheGroup
from kvxfer.connectors.vllm.fetches import Fetches
from kvxfer.connectors.vllm.kept_blocks import KeptBlocks
from kvxfer.connectors.vllm.place import Place
from kvxfer.connectors.vllm.regions import CacheRegions
from kvxfer.connectors.vllm.settings import Settings
from kvxfer.connectors.vllm.step import RankMetadata, StepMetadata


@dataclass(frozen=True, slots=True)
class StepResults:
    """What came to its end since the last step.

    Attributes
    ----------
    sent
        Requests whose blocks were fetched, or whose time is over.
    received
        Requests whose fetch has ended, those that failed among them.
    failed
        Of these the ones that failed, with the blocks of the first group that lack bytes.
    """

    sent: set[str]
    received: set[str]
    failed: dict[str, set[int]]


class WorkerHalf:
    """Moves this worker's share of the caches that its engine hands over and takes over."""

    def __init__(self, place: Place, groups: tuple[CacheGroup, ...], settings: Settings) -> None:
        self._place = place
        self._groups = groups
        self._settings = settings
        self._agent = kvxfer.Agent(_name(place), settings.agent_options())
        self._kept = KeptBlocks(self._agent, settings.lease_ttl_s)
        self._regions: CacheRegions | None = None
        self._fetches: Fetches | None = None

    def register(self, caches: dict[str, Any]) -> None:
        """Registers the engine's cache tensors, once they are there."""
        self._regions = CacheRegions(self._agent, self._groups, caches, self._place)
        self._fetches = Fetches(self._agent, self._regions, self._place, self._settings)

    @property
    def rank(self) -> RankMetadata:
        """Where this worker's agent is."""
        assert self._regions is not None, "the engine asks before it has registered its caches"
        return RankMetadata(self._agent.name, self._agent.address, tuple(self._regions.pages_per_block))

    def step(self, step: StepMetadata) -> None:
        """Does what the scheduler half asks for. Returns at once."""
        assert self._regions is not None, "the engine steps before it has registered its caches"
        assert self._fetches is not None
        for request_id in step.withdrawn:
            self._kept.withdraw(request_id)
        for grant in step.grants:
            self._kept.grant(grant, self._regions)
        for order in step.fetches:
            self._fetches.begin(order)
        for request_id in step.abandoned:
            self._fetches.abandon(request_id)
        for handover in step.released:
            self._fetches.release(handover)

    def collect(self, finished_request_ids: set[str]) -> StepResults:
        """Returns what has ended, each request once."""
        sent = self._kept.collect(finished_request_ids)
        received, failed = (set(), {}) if self._fetches is None else self._fetches.collect()
        return StepResults(sent, received, failed)

    def close(self) -> None:
        """Ends everything: when it returns, no byte lands in the engine's caches any more."""
        if self._fetches is not None:
            self._fetches.close()
        self._kept.close()
        self._agent.close()


def _name(place: Place) -> str:
    """Two engines may be given one id, and one that restarts keeps it: their agents are others."""
    engine = place.engine_id.encode(errors="replace")[:96].decode(errors="ignore")
    return f"{engine}.{place.tp_rank}.{secrets.token_hex(4)}"
