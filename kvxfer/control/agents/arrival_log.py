"""Lines of the daemon's log about agents that attach and go; many at once share a line."""

from __future__ import annotations

import asyncio
from typing import Final

from kvxfer.control.agents.attached import Attached
from kvxfer.log import logger

#: Lines of their own in each window; further agents of the window are only counted, in one more line.
MOST_LINES: Final = 20
WINDOW_S: Final = 10.0


class ArrivalLog:
    """Writes one line for each agent that attaches or goes, but few if hundreds come. On the event loop."""

    def __init__(self) -> None:
        self._lines = 0
        self._attached = self._gone = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def attached(self, agent: Attached) -> None:
        """Reports an agent that has attached."""
        if self._has_line():
            _say(agent, f"attached, from process {agent.pid} with kvxfer {agent.version}")
        else:
            self._attached += 1

    def gone(self, agent: Attached) -> None:
        """Reports an agent whose connection has ended."""
        if self._has_line():
            _say(agent, f"of process {agent.pid} is gone")
        else:
            self._gone += 1

    def close(self) -> None:
        """Writes the counts, and nothing more: agents that go now go because the daemon ends."""
        self.tell()
        self._is_closed = True

    def tell(self) -> None:
        """Ends the window, and writes the counts of further agents; the timer calls it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        counts = {"attached": self._attached, "gone": self._gone}
        if any(counts.values()):
            logger().info(
                "further agents within %g s: %d attached, %d are gone",
                WINDOW_S,
                *counts.values(),
                extra={"fields": counts},
            )
        self._lines = self._attached = self._gone = 0

    def _has_line(self) -> bool:
        if self._is_closed:
            return False
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WINDOW_S, self.tell)
        self._lines += 1
        return self._lines <= MOST_LINES


def _say(agent: Attached, words: str) -> None:
    logger().info(
        "agent %s %s",
        agent.name,
        words,
        extra={"fields": {"agent": agent.name, "agent_id": agent.incarnation, "agent_pid": agent.pid}},
    )
