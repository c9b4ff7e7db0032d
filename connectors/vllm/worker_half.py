"""The half of the connector beside each worker: has the agent, the regions and all that moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import kvxfer
from kvxfer.connectors.vllm.cache_groups import CacheGroup
from kvxfer.connectors.vllm.fetches import Fetches
from kvxfer.connectors.vllm.handouts import Handouts
from kvxfer.connectors.vllm.regions import CacheRegions
from kvxfer.connectors.vllm.settings import Settings
from kvxfer.connectors.vllm.step import RankMetadata, StepMetadata


@dataclass(frozen=True, slots=True)
class Place:
    """Which worker of which engine this is.

    Attributes
    ----------
    engine_id
        Of its engine.
    tp_rank, tp_size
        Among the workers that divide heads.
    model
        Declared name of the model.
    cache_dtype
        As the engine was told, e.g. ``"auto"`` or ``"fp8"``.
    total_heads
        KV heads of the model.
    num_blocks
        Of the engine's cache.
    """

    engine_id: str
    tp_rank: int
    tp_size: int
    model: str
    cache_dtype: str
    total_heads: int
    num_blocks: int


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
        Of these the ones that failed, with the blocks of group 0 that lack bytes.
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
        # The name's end tells ranks apart, its beginning engines.
        self._agent = kvxfer.Agent(f"{place.engine_id[:100]}.{place.tp_rank}", settings.agent_options())
        self._handouts = Handouts(self._agent, settings.lease_ttl_s)
        self._regions: CacheRegions | None = None
        self._fetches: Fetches | None = None

    def register(self, caches: dict[str, Any]) -> None:
        """Registers the engine's cache tensors, once they are there."""
        place = self._place
        self._regions = CacheRegions(
            self._agent,
            self._groups,
            caches,
            model=place.model,
            cache_dtype=place.cache_dtype,
            total_heads=place.total_heads,
            tp_rank=place.tp_rank,
            tp_size=place.tp_size,
            num_blocks=place.num_blocks,
        )
        self._fetches = Fetches(
            self._agent, self._regions, place.tp_rank, place.tp_size, self._settings.load_timeout_s
        )

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
            self._handouts.withdraw(request_id)
        for grant in step.grants:
            self._handouts.grant(grant, self._regions)
        for order in step.fetches:
            self._fetches.begin(order)
        for request_id in step.abandoned:
            self._fetches.abandon(request_id)

    def collect(self, finished_request_ids: set[str]) -> StepResults:
        """Returns what has ended, each request once."""
        sent = self._handouts.collect(finished_request_ids)
        received, failed = (set(), {}) if self._fetches is None else self._fetches.collect()
        return StepResults(sent, received, failed)

    def close(self) -> None:
        """Ends everything: when it returns, no byte lands in the engine's caches any more."""
        if self._fetches is not None:
            self._fetches.close()
        self._handouts.close()
        self._agent.close()
