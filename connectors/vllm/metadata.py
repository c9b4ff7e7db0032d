"""What goes between the halves, in the envelopes that the engine carries."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvxfer.connectors.common.step import OwnRank, Step


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """What a step asks of the workers."""

    step: Step


@dataclass(frozen=True)
class RankMetadata(KVConnectorHandshakeMetadata):
    """Where this worker's agent is."""

    rank: OwnRank


@dataclass(frozen=True)
class RanksMetadata(KVConnectorWorkerMetadata):
    """The same with a worker's first step: a MultiConnector passes on the handshake of one child alone.

    Attributes
    ----------
    ranks
        By (pipeline, tensor) rank.
    """

    ranks: dict[tuple[int, int], OwnRank]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Adds another worker's."""
        assert isinstance(other, RanksMetadata)
        return RanksMetadata({**self.ranks, **other.ranks})
