"""How agents' leases ended, counted for /metrics; leases that expired are apart from revoked ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: The states of `kvxfer.LeaseState`; "ended" if the agent could not say how.
WAYS: Final = ("expired", "revoked", "peer-lost", "region-gone", "ended")
# Agents whose last counts are remembered, so that an agent that attaches again is not counted twice.
_MOST_AGENTS: Final = 4096


class LeaseCounts:
    """Counts since the daemon's start. Each agent reports how many leases have ended since it was made.

    An agent's first report is only the base for its next ones, because the agent may be older than this
    daemon.
    """

    def __init__(self) -> None:
        self.ended = dict.fromkeys(WAYS, 0)
        self._reported: dict[str, dict[str, int]] = {}
        self._run_out: dict[str, int] = {}

    def take(self, agent: str, told: Mapping[str, int]) -> None:
        """Adds the difference between an agent's last report and this one."""
        before = self._reported.pop(agent, None)
        self._reported[agent] = dict(told)
        if len(self._reported) > _MOST_AGENTS:
            del self._reported[next(iter(self._reported))]
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
        """Notes that a lease expired by the daemon's clock, though its agent will report it as revoked."""
        self._run_out[agent] = self._run_out.get(agent, 0) + 1
