"""Draining the node: new work is refused, running work goes on, and then the node is ready to stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

from kvxfer.control import schema
from kvxfer.control.agents.agent_errors import AgentGone, CallRefused
from kvxfer.control.agents.agent_view import AgentView
from kvxfer.control.agents.attached import Attached
from kvxfer.control.schema.problems import Refusal
from kvxfer.control.state.store import Store, number

_KIND: Final = "node"
_ID: Final = "drain"
# The longest deadline of a drain (schema.Seconds), should the time of day have been set back.
_MOST_S: Final = 86400.0
# For telling one agent; all agents are told at the same time.
_TELL_TIMEOUT_S: Final = 5.0


class Drains:
    """Whether the node drains. Kept over restarts: a node that was draining drains again after a restart.

    Attributes
    ----------
    count_running
        Returns how many of the daemon's own transfers are running; `Moves` sets it.
    """

    def __init__(
        self,
        store: Store,
        agents: AgentView,
        note: Callable[[str, dict[str, Any]], None],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._agents = agents
        self._note = note
        self._clock = clock
        self._refused: dict[str, str] = {}
        self._was_ready = False
        self._ends = False
        self.count_running: Callable[[], int] = lambda: 0
        # As a time of day, which a restart keeps; while the daemon runs, the monotonic clock decides.
        self._deadline_at_s: float | None = store.load(_KIND, number).get(_ID)
        self._ends_at = 0.0
        if self._deadline_at_s is not None:
            left_s = min(max(0.0, self._deadline_at_s - clock()), _MOST_S)
            self._ends_at = time.monotonic() + left_s

    @property
    def draining(self) -> bool:
        """Whether new work is refused."""
        return self._deadline_at_s is not None

    @property
    def ends(self) -> bool:
        """Whether the daemon is stopping, which also makes it refuse new work."""
        return self._ends

    def require_open(self) -> None:
        """Refuses new work while the node drains, or the daemon is stopping."""
        if self._ends:
            raise Refusal("draining", "this daemon is stopping, and takes no new work")
        if self.draining:
            raise Refusal(
                "draining", "this node is draining, and takes no new work (DELETE /v1/drain ends the drain)"
            )

    def shown(self) -> schema.Drain:
        """Returns the state of the drain."""
        running = self.count_running()
        agents = []
        for agent in self._agents.all():
            count = _open_transfers(agent)
            running += count if self.draining and agent.draining else 0
            agents.append(
                schema.DrainAgent(
                    agent=agent.incarnation,
                    name=agent.name,
                    draining=agent.draining,
                    open_transfers=count,
                    refused=self._refused.get(agent.incarnation, ""),
                )
            )
        late = self._left_s() == 0.0
        return schema.Drain(
            draining=self.draining,
            ready=self.draining and (running == 0 or late),
            deadline_at_s=self._deadline_at_s,
            running=running,
            agents=agents,
        )

    async def begin(self, deadline_s: float) -> schema.Drain:
        """Refuses new work from now on, and asks the agents to do the same."""
        deadline_at_s = self._clock() + deadline_s
        await self._store.put(_KIND, _ID, deadline_at_s, need="reserve")
        self._deadline_at_s, self._ends_at = deadline_at_s, time.monotonic() + deadline_s
        self._was_ready = False
        # Before the agents know: their answers may make the node ready.
        self._note("drain.begun", {"deadline_s": deadline_s})
        await self._tell_all(deadline_s)
        self.look()
        return self.shown()

    async def end(self) -> schema.Drain:
        """Ends the drain."""
        await self._store.remove(_KIND, _ID, need="reserve")
        was = self.draining
        self._deadline_at_s = None
        if was:
            await self._tell_all(None)
            self._note("drain.ended", {})
        return self.shown()

    async def stop_taking(self, timeout_s: float) -> None:
        """Refuses new work until the daemon has stopped, and waits for the transfers that it began."""
        self._ends = True
        until_s = time.monotonic() + timeout_s
        while self.count_running() and time.monotonic() < until_s:  # noqa: ASYNC110  # records may be lost
            await asyncio.sleep(0.05)

    async def tell_new(self, agent: Attached) -> None:
        """Tells an agent that attached late whether the node drains, if the agent's own state differs."""
        if agent.draining != self.draining:
            await self._tell(agent, self._left_s() if self.draining else None)

    def look(self) -> None:
        """Adds an event when the node becomes ready, once."""
        if self.draining and not self._was_ready and self.shown().ready:
            self._was_ready = True
            self._note("drain.ready", {})

    def _left_s(self) -> float:
        return max(0.0, self._ends_at - time.monotonic())

    async def _tell_all(self, deadline_s: float | None) -> None:
        self._refused.clear()
        await asyncio.gather(*(self._tell(agent, deadline_s) for agent in self._agents.all()))

    async def _tell(self, agent: Attached, deadline_s: float | None) -> None:
        try:
            await self._agents.call(agent, "drain", {"deadline_s": deadline_s}, _TELL_TIMEOUT_S)
            self._refused.pop(agent.incarnation, None)
        except CallRefused as error:
            self._refused[agent.incarnation] = error.words
        except (AgentGone, TimeoutError):
            self._refused[agent.incarnation] = "it did not answer"


def _open_transfers(agent: Attached) -> int:
    found: int = agent.stats.get("transfers_open", 0)
    return found
