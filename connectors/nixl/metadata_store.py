"""The store where agents keep metadata for agents that know only their names."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final

from kvxfer.errors import KvxferError, NoAnswerError
from kvxfer.log import logger
from kvxfer.loop_thread import LoopThread
from kvxfer.raw_agent import RawAgent

#: The label of an agent's complete metadata; other labels hold metadata of some of its memory.
WHOLE: Final = "metadata"
# Longer than any single call to a store takes; stores have limits of their own.
_CALL_S: Final = 15.0


class MetadataStore:
    """Stores one agent's metadata and follows those of other agents, on a thread that sleeps when idle.

    Subclasses implement the store's own calls, which run on the thread. Every method of this class may be
    called from any thread.

    Parameters
    ----------
    raw_agent, name
        The raw agent, and its name.
    wait_s
        How long a fetch waits for metadata.
    where
        The store's name in messages.
    """

    def __init__(self, raw_agent: RawAgent, name: str, wait_s: float, where: str) -> None:
        self._raw_agent = raw_agent
        self._own = name
        self._wait_s = wait_s
        self._where = where
        self._thread = LoopThread("kvxfer-metadata")

    def send(self, label: str, metadata: bytes) -> None:
        """Stores this agent's metadata under a label and replaces earlier ones; returns when they are there.

        Raises
        ------
        PeerError
            ``unreachable``, ``no-answer``: the store does not answer.
        """
        self._call(self._put(label, metadata))

    def fetch(self, agent: str, label: str) -> None:
        """Begins to fetch another agent's metadata, and to follow their changes."""
        self._thread.start(self._begin_to_follow(agent, label))

    def forget(self, agent: str) -> None:
        """Stops following an agent."""
        self._thread.start(self._end_following(agent))

    def withdraw(self) -> None:
        """Removes all of this agent's metadata; returns when they are gone. Raises like `send`."""
        self._call(self._remove())

    def close(self) -> None:
        """Ends the thread, and removes metadata if the store ties them to their agent's life."""
        try:
            self._thread.call(self._end(), _CALL_S)
        except (KvxferError, TimeoutError) as error:
            logger().info("kvxfer: %s: %s", self._where, error)
        self._thread.close(_CALL_S)

    def _call(self, call: Coroutine[Any, Any, None]) -> None:
        try:
            self._thread.call(call, _CALL_S)
        except TimeoutError:
            raise NoAnswerError(
                f"{self._where} did not answer within {_CALL_S:g} s", code="no-answer"
            ) from None

    def _take_in(self, agent: str, metadata: bytes) -> None:
        """Adds the metadata found under an agent's name.

        A process that may write to the store may write under any name. So the agent that the metadata name
        must prove the secret before any byte moves.
        """
        try:
            self._raw_agent.add_remote(metadata)
        except KvxferError as error:
            logger().warning("kvxfer: metadata of %s in %s cannot be used: %s", agent, self._where, error)

    def _not_there(self, agent: str, label: str) -> None:
        logger().warning(
            "kvxfer: %s has no %s of agent %s after %g s: has it sent them?",
            self._where,
            label,
            agent,
            self._wait_s,
        )

    # ---- for subclasses; runs on the thread

    async def _put(self, label: str, metadata: bytes) -> None:
        raise NotImplementedError

    async def _remove(self) -> None:
        raise NotImplementedError

    async def _begin_to_follow(self, agent: str, label: str) -> None:
        raise NotImplementedError

    async def _end_following(self, agent: str) -> None:
        raise NotImplementedError

    async def _end(self) -> None:
        raise NotImplementedError
