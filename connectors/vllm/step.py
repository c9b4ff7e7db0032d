"""What the scheduler half tells the worker halves in each step of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from kvxfer.connectors.vllm.handover import Handover


@dataclass(frozen=True)
class RankMetadata(KVConnectorHandshakeMetadata):
    """Where this worker's agent is; the scheduler half tells it with each finished request.

    Attributes
    ----------
    pages_per_block
        For each cache group, pages of its region in a block of the engine.
    """

    name: str
    address: str
    pages_per_block: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """Blocks of a prompt whose last token is computed in this step: who names a lease may read them.

    Attributes
    ----------
    leases
        Ids, one for each cache group, chosen by the scheduler half: it has to tell them before it
        hears of the workers again.
    tables
        For each cache group its blocks; 0 for none.
    """

    request_id: str
    leases: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """A request whose prompt was computed elsewhere.

    Attributes
    ----------
    handover
        Where it was; or why its parameters cannot be used.
    tables
        For each cache group this engine's blocks of the whole prompt; 0 for none.
    first_token, num_tokens
        Which tokens of the prompt are missing here: from the first to the prompt's end.
    """

    request_id: str
    handover: Handover | str
    tables: tuple[tuple[int, ...], ...]
    first_token: int
    num_tokens: int


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """One step: what to grant, to take back, to fetch, to stop fetching, and to let prefill have again."""

    grants: list[Grant] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    fetches: list[FetchOrder] = field(default_factory=list)
    abandoned: list[str] = field(default_factory=list)
    released: list[Handover] = field(default_factory=list)
