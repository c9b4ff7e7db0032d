"""A worker's position: its engine, its ranks, its GPU."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final

from kvxfer.address import Address
from kvxfer.directory import Entry

# Of the 128 bytes of an agent's name.
_MAX_ENGINE_NBYTES: Final = 96
_ANY_INCARNATION: Final = bytes(16)


@dataclass(frozen=True, slots=True)
class WorkerRank:
    """The position of a worker in its engine.

    Attributes
    ----------
    engine_id
        The engine's id.
    tp_rank, tp_size
        The worker's rank among the workers that divide the heads.
    pp_rank, pp_size
        The worker's rank among the workers that divide the layers.
    gpu
        The index of the GPU that holds its cache; None for host memory.
    dp_rank
        The engine's rank among the engines behind one front end.
    """

    engine_id: str
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    gpu: int | None = None
    dp_rank: int = 0

    @property
    def rank(self) -> int:
        """The worker's number among the engine's workers."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def num_ranks(self) -> int:
        """How many workers the engine has."""
        return self.pp_size * self.tp_size

    @property
    def index(self) -> int:
        """The worker's number among the workers of all engines behind one front end."""
        return self.dp_rank * self.num_ranks + self.rank

    def agent_name(self) -> str:
        """Draws a name for its agent. It is random because two engines, or two starts, may have one id."""
        return f"{engine_name(self.engine_id)}/{self.rank}.{secrets.token_hex(4)}"


def agents_of(engine: str) -> str:
    """Returns the holder of leases for all workers of an engine, as `kvxfer.Region.grant` takes it."""
    return f"{engine}/*"


def some_agent(engine_id: str, address: Address) -> Entry:
    """Returns an entry for an agent whose engine and address are known, but not its name."""
    return Entry(agents_of(engine_name(engine_id)), str(address), _ANY_INCARNATION)


def is_some_agent(entry: Entry) -> bool:
    """Whether `some_agent` made an entry."""
    return entry.name.endswith("/*") and entry.incarnation == _ANY_INCARNATION


def engine_of(agent_name: str) -> str:
    """Returns the `engine_name` of an agent's engine."""
    return agent_name.partition("/")[0]


def engine_name(engine_id: str) -> str:
    """Returns the prefix of an engine's agent names: its id, cut if it is long."""
    # A slash ends the engine's part of an agent's name, so the id must not contain one.
    engine = engine_id.replace("/", "_").encode(errors="replace")
    return engine[:_MAX_ENGINE_NBYTES].decode(errors="ignore")
