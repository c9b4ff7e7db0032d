"""Where agents keep metadata for others that know their names alone."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final

from kvxfer.door import Door
from kvxfer.errors import KvxferError, PeerError
from kvxfer.log import logger
from kvxfer.loop_thread import LoopThread

#: Under which an agent's whole metadata are kept; what is kept under others is of some of its memory.
WHOLE: Final = "metadata"
# Longer than any one call to a store takes, which has limits of its own.
_CALL_S: Final = 15.0


class MetadataStore:
    """Metadata of one agent's, and those of others that it follows, by a thread that sleeps meanwhile.

    Subclasses have the store's own calls, which run on the thread. Every method of this class may be called
    from any thread.

    Parameters
    ----------
    door, name
        The agent's.
    wait_s
        How long metadata that are fetched are waited for.
    where
        The store, in words.
    """

    def __init__(self, door: Door, name: str, wait_s: float, where: str) -> None:
        self._door = door
        self._own = name
        self._wait_s = wait_s
        self._where = where
        self._thread = LoopThread("kvxfer-metadata")

    def send(self, label: str, metadata: bytes) -> None:
        """Has this agent's metadata there when it returns, in place of what it had under this label.

        Raises
        ------
        PeerError
            ``unreachable``: the store does not answer.
        """
        self._call(self._put(label, metadata))

    def fetch(self, agent: str, label: str) -> None:
        """Begins to take in another agent's metadata, and to follow what becomes of them."""
        self._thread.start(self._begin_to_follow(agent, label))

    def forget(self, agent: str) -> None:
        """Follows an agent no more."""
        self._thread.start(self._end_following(agent))

    def withdraw(self) -> None:
        """Has none of this agent's metadata there when it returns; raises as `send`."""
        self._call(self._remove())

    def close(self) -> None:
        """Ends it; metadata that end with their agent do."""
        try:
            self._thread.call(self._end(), _CALL_S)
        except (KvxferError, TimeoutError) as error:
            logger().info("kvxfer: %s: %s", self._where, error)
        self._thread.close(_CALL_S)

    def _call(self, call: Coroutine[Any, Any, None]) -> None:
        try:
            self._thread.call(call, _CALL_S)
        except TimeoutError:
            raise PeerError(
                f"{self._where} did not answer within {_CALL_S:g} s", code="unreachable"
            ) from None

    def _take_in(self, agent: str, metadata: bytes) -> None:
        """Takes in what lies under an agent's name.

        Who may write to the store may write under any: whom it names proves the secret before anything moves.
        """
        try:
            self._door.add_remote(metadata)
        except KvxferError as error:
            logger().warning("kvxfer: metadata of %s in %s: %s", agent, self._where, error)

    def _not_there(self, agent: str, label: str) -> None:
        logger().warning(
            "kvxfer: %s has no %s of agent %s after %g s: has it sent them?",
            self._where,
            label,
            agent,
            self._wait_s,
        )

    # ---- the store's own, on the thread

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
