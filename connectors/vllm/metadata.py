"""What goes between the halves, in the envelopes that the engine carries."""

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
    """What a step asks of the workers."""

    step: Step


@dataclass(frozen=True)
class RankMetadata(KVConnectorHandshakeMetadata):
    """Where this worker's agent is."""

    rank: OwnRank


@dataclass(frozen=True)
class WorkerMetadata(KVConnectorWorkerMetadata):
    """What workers tell the scheduler half.

    Attributes
    ----------
    ranks
        Where their agents are, by (pipeline, tensor) rank: with a worker's first step as well, since a
        MultiConnector passes on the handshake of one child alone.
    news
        Of requests that are kept here.
    """

    ranks: dict[tuple[int, int], OwnRank]
    news: News

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Adds another worker's."""
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata({**self.ranks, **other.ranks}, self.news | other.news)
