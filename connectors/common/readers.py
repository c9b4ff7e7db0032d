"""Which engines read a request that is kept here, and which of their workers are done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvxfer.connectors.common.handover import MAX_READERS
from kvxfer.connectors.common.place import engine_of


@dataclass(slots=True)
class _Engine:
    num_ranks: int = 0  # of its workers; 0 until one of them has said it
    done: set[int] = field(default_factory=set)


class Readers:
    """Engines that read one request.

    Parameters
    ----------
    named
        The only engines that may, each of which is waited for. Where none is named these are all that are
        heard of before the others are done.
    """

    def __init__(self, named: Sequence[str] = ()) -> None:
        #: Whether no others may come.
        self.are_named = bool(named)
        self._engines = {engine: _Engine() for engine in named}

    def may_be(self, agent_name: str) -> bool:
        """Returns whether an agent may be a reader's."""
        return not self.are_named or engine_of(agent_name) in self._engines

    def came(self, agent_name: str) -> None:
        """Takes in that an agent's engine will read; of too many, those that come last are not waited for."""
        if len(self._engines) < MAX_READERS:
            self._engines.setdefault(engine_of(agent_name), _Engine())

    def read(self, agent_name: str, rank: int, num_ranks: int) -> None:
        """Takes in that a worker, of so many of its engine, is done."""
        self.came(agent_name)
        if (engine := self._engines.get(engine_of(agent_name))) is not None:
            engine.num_ranks = num_ranks
            engine.done.add(rank)

    @property
    def are_done(self) -> bool:
        """Whether some have come, and all of these are done."""
        return bool(self._engines) and all(
            engine.num_ranks and len(engine.done) >= engine.num_ranks for engine in self._engines.values()
        )
