"""Notifications that have arrived, until somebody reads them."""

from __future__ import annotations

from collections.abc import AsyncIterator

from kvxfer._native import AgentCore
from kvxfer.errors import AgentError
from kvxfer.notification import Notification
from kvxfer.session.completion import NOTIFICATION, Completions
from kvxfer.session.peer_table import PeerTable


class Inbox:
    """Hands each notification to one reader; native code keeps and bounds those that wait."""

    def __init__(self, core: AgentCore, completions: Completions, peers: PeerTable, agent_name: str) -> None:
        self._core = core
        self._completions = completions
        self._peers = peers
        self._agent_name = agent_name

    async def stream(self) -> AsyncIterator[Notification]:
        """Yields notifications as they arrive; ends when the agent closes."""
        found: list[Notification] = []
        while True:
            try:
                await self._completions.until(NOTIFICATION, lambda: self._take_into(found))
            except AgentError as error:
                if error.code == "closed":
                    return
                raise
            yield found.pop()

    def wait(self, timeout_s: float | None) -> Notification:
        """Blocks until one is there and returns it, or raises `TimeoutError`."""
        found: list[Notification] = []
        if not self._completions.block_until(lambda: self._take_into(found), timeout_s):
            raise TimeoutError(f"no notification reached {self._agent_name} within {timeout_s} s")
        return found[0]

    def poll(self) -> Notification | None:
        """Returns the oldest that nobody has read, or None; never waits."""
        self._completions.check()
        note = self._take()
        if note is None:
            self._completions.drain()
        return note

    # ---- inside -----------------------------------------------------------------------------

    def _take(self) -> Notification | None:
        taken = self._core.take_notification()
        if taken is None:
            return None
        peer_id, payload, context = taken
        return Notification(self._peers.get_or_nameless(peer_id), payload, context)

    def _take_into(self, found: list[Notification]) -> bool:
        note = self._take()
        if note is not None:
            found.append(note)
        return note is not None
