"""Inboxes: notifications or messages that peers sent and that were not read yet."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

from kvxfer.errors import AgentError
from kvxfer.session.completion import Completions, Key
from kvxfer.session.peer_table import PeerTable

T = TypeVar("T")


class Inbox(Generic[T]):
    """Gives each notification (or message) to one reader; native code keeps and bounds the unread ones.

    Parameters
    ----------
    take
        Returns the oldest unread item, as the peer's number, its other fields and its sender, or None.
    make
        Makes the reader's object from the peer and those fields.
    key
        The kind's key in the ring's events; its first part names it in errors.
    """

    def __init__(
        self,
        take: Callable[[], tuple[Any, ...] | None],
        make: Callable[..., T],
        key: Key,
        completions: Completions,
        peers: PeerTable,
        agent_name: str,
    ) -> None:
        self._take_native = take
        self._make = make
        self._key = key
        self._completions = completions
        self._peers = peers
        self._agent_name = agent_name

    async def next(self, timeout_s: float | None) -> T:
        """Waits for an item and returns it, or raises `TimeoutError`."""
        found: list[T] = []
        if not await self._completions.until(self._key, lambda: self._take_into(found), timeout_s):
            raise self._late(timeout_s)
        return found[0]

    def next_blocking(self, timeout_s: float | None) -> T:
        """Blocks until there is an item and returns it: the twin of `next`."""
        found: list[T] = []
        if not self._completions.block_until(lambda: self._take_into(found), timeout_s):
            raise self._late(timeout_s)
        return found[0]

    async def stream(self) -> AsyncIterator[T]:
        """Yields items as they arrive; ends when the agent closes."""
        found: list[T] = []
        while True:
            try:
                await self._completions.until(self._key, lambda: self._take_into(found))
            except AgentError as error:
                if error.code == "closed":
                    return
                raise
            yield found.pop()

    def take(self) -> T | None:
        """Takes the oldest unread item; None if there is none. Never waits."""
        self._completions.check()
        one = self._take()
        if one is None:
            self._completions.drain()
        return one

    # ---- inside -----------------------------------------------------------------------------

    def _late(self, timeout_s: float | None) -> TimeoutError:
        return TimeoutError(f"no {self._key[0]} reached {self._agent_name} within {timeout_s} s")

    def _take(self) -> T | None:
        taken = self._take_native()
        if taken is None:
            return None
        peer_id, *fields, sender = taken
        return self._make(self._peers.sender(peer_id, sender), *fields)

    def _take_into(self, found: list[T]) -> bool:
        one = self._take()
        if one is not None:
            found.append(one)
        return one is not None
