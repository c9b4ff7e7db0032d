"""How agents' leases ended, counted for /metrics: those that ran out apart from those that were revoked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: As `kvxfer.LeaseState` has them; "ended" where the agent could not say how.
WAYS: Final = ("expired", "revoked", "peer-lost", "region-gone", "ended")
# Agents whose last counts are remembered: one that attaches again is not counted twice.
_MOST_AGENTS: Final = 4096


class LeaseCounts:
    """Counts since the daemon's start, of what agents tell: each tells how many have ended since its making.

    What an agent tells first is where its counting begins: it may have lived through other daemons.
    """

    def __init__(self) -> None:
        self.ended = dict.fromkeys(WAYS, 0)
        self._told: dict[str, dict[str, int]] = {}
        self._run_out: dict[str, int] = {}

    def take(self, agent: str, told: Mapping[str, int]) -> None:
        """Counts what an agent tells anew."""
        before = self._told.pop(agent, None)
        self._told[agent] = dict(told)
        if len(self._told) > _MOST_AGENTS:
            del self._told[next(iter(self._told))]
        if before is None:
            return
        for way in WAYS:
            more = max(0, told.get(way, 0) - before.get(way, 0))
            if way == "revoked":
                run_out = min(more, self._run_out.get(agent, 0))
                if run_out:
                    self._run_out[agent] -= run_out
                    self.ended["expired"] += run_out
                more -= run_out
            self.ended[way] += more

    def note_expired(self, agent: str) -> None:
        """Takes that a lease ran out by the daemon's clock. Its agent, which revoked it, calls it revoked."""
        self._run_out[agent] = self._run_out.get(agent, 0) + 1
