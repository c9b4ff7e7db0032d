"""Which worker of which engine this is."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final

from kvxfer.address import Address
from kvxfer.directory import Entry

# Of an agent's 128 bytes.
_MAX_ENGINE_NBYTES: Final = 96
_ANY_INCARNATION: Final = bytes(16)


@dataclass(frozen=True, slots=True)
class Place:
    """A worker among those of its engine.

    Attributes
    ----------
    engine_id
        Of its engine.
    tp_rank, tp_size
        Among the workers that divide heads.
    pp_rank, pp_size
        Among those that divide layers.
    gpu
        The index of the GPU on which its cache lies; None for memory of the host.
    dp_rank
        Of its engine, among those behind one front end.
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
        """Its number among the engine's workers."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def num_ranks(self) -> int:
        """How many workers the engine has."""
        return self.pp_size * self.tp_size

    @property
    def index(self) -> int:
        """Its number among the workers of all engines behind one front end."""
        return self.dp_rank * self.num_ranks + self.rank

    def agent_name(self) -> str:
        """Draws a name for its agent: two engines may be given one id, and one that restarts keeps it."""
        return f"{engine_name(self.engine_id)}/{self.rank}.{secrets.token_hex(4)}"


def agents_of(engine: str) -> str:
    """Returns how leases name all workers' agents of an engine, as `kvxfer.Region.grant` takes it."""
    return f"{engine}/*"


def some_agent(engine_id: str, address: Address) -> Entry:
    """Returns the entry of an agent of which only its engine and its address are known."""
    return Entry(agents_of(engine_name(engine_id)), str(address), _ANY_INCARNATION)


def is_some_agent(entry: Entry) -> bool:
    """Whether an entry is of `some_agent`."""
    return entry.name.endswith("/*") and entry.incarnation == _ANY_INCARNATION


def engine_of(agent_name: str) -> str:
    """Returns which engine's an agent is, as `engine_name` has it."""
    return agent_name.partition("/")[0]


def engine_name(engine_id: str) -> str:
    """Returns what an engine's agents are called by: its id, or how that begins."""
    # What is before the slash is one engine's, and no part of another's.
    engine = engine_id.replace("/", "_").encode(errors="replace")
    return engine[:_MAX_ENGINE_NBYTES].decode(errors="ignore")
