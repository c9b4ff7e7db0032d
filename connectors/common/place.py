"""Which worker of which engine this is."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final

# Of an agent's 128 bytes.
_MAX_ENGINE_NBYTES: Final = 96


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
    """

    engine_id: str
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    gpu: int | None = None

    @property
    def rank(self) -> int:
        """Its number among the engine's workers."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def num_ranks(self) -> int:
        """How many workers the engine has."""
        return self.pp_size * self.tp_size

    def agent_name(self) -> str:
        """Draws a name for its agent: two engines may be given one id, and one that restarts keeps it."""
        return f"{_engine(self.engine_id)}/{self.rank}.{secrets.token_hex(4)}"


def agents_of(engine_id: str) -> str:
    """Returns how leases name all workers' agents of an engine, as `kvxfer.Region.grant` takes it."""
    return f"{_engine(engine_id)}/*"


def is_among(agent_name: str, agents: str) -> bool:
    """Returns whether an agent is one of those that `agents_of` names."""
    return agent_name.startswith(agents.removesuffix("*"))


def _engine(engine_id: str) -> str:
    # What is before the slash is one engine's, and no part of another's.
    engine = engine_id.replace("/", "_").encode(errors="replace")
    return engine[:_MAX_ENGINE_NBYTES].decode(errors="ignore")
