"""Tracks the engines that read a kept request, and their workers that are done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvxfer.connectors.common.handover import MAX_READERS
from kvxfer.connectors.common.worker_rank import engine_of


@dataclass(slots=True)
class _Engine:
    num_ranks: int = 0  # the engine's number of workers; 0 until one of them has told it
    done: set[int] = field(default_factory=set)


class Readers:
    """The engines that read one request.

    Parameters
    ----------
    named
        The engines that the router names as readers. Only they may read, and each must finish. If none is
        named, the readers are all engines that are heard of before the known ones are done.
    """

    def __init__(self, named: Sequence[str] = ()) -> None:
        #: Whether the router named the readers, so that no other engine may come.
        self.are_named = bool(named)
        self._engines = {engine: _Engine() for engine in named}

    def may_be(self, agent_name: str) -> bool:
        """Returns whether an agent's engine may read the request."""
        return not self.are_named or engine_of(agent_name) in self._engines

    def came(self, agent_name: str) -> None:
        """Adds an agent's engine as a reader. Beyond the bound, further engines are not waited for."""
        if len(self._engines) < MAX_READERS:
            self._engines.setdefault(engine_of(agent_name), _Engine())

    def read(self, agent_name: str, rank: int, num_ranks: int) -> None:
        """Marks worker `rank` of the agent's engine, which has `num_ranks` workers, as done."""
        self.came(agent_name)
        if (engine := self._engines.get(engine_of(agent_name))) is not None:
            engine.num_ranks = num_ranks
            engine.done.add(rank)

    @property
    def are_done(self) -> bool:
        """Whether at least one engine is known, and all known engines are done."""
        return bool(self._engines) and all(
            engine.num_ranks and len(engine.done) >= engine.num_ranks for engine in self._engines.values()
        )
