"""The messages between the two halves, in the types that the engine carries."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvxfer.connectors.common.step import News, OwnRank, Step


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """The orders for the workers in one step."""

    step: Step


@dataclass(frozen=True)
class RankMetadata(KVConnectorHandshakeMetadata):
    """This worker's agent."""

    rank: OwnRank


@dataclass(frozen=True)
class WorkerMetadata(KVConnectorWorkerMetadata):
    """The workers' report to the scheduler half.

    Attributes
    ----------
    ranks
        The workers' agents, by (pipeline, tensor) rank. Each worker's first step carries its agent, because a
        MultiConnector passes on the handshake of only one child.
    news
        News of requests that are kept here.
    """

    ranks: dict[tuple[int, int], OwnRank]
    news: News

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Adds another worker's report."""
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata({**self.ranks, **other.ranks}, self.news | other.news)
