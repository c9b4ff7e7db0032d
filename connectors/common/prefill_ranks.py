"""Sessions with the agents of prefill engines: dialled when first needed, without stopping the engine."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Final

import kvxfer
from kvxfer.connectors.common.dialling import Diallers
from kvxfer.connectors.common.place import agents_of, engine_of, is_some_agent
from kvxfer.directory import Entry

# Beside those that are open, that many may be remembered in vain: to look through all costs what they are.
_MAX_LOST: Final = 256


class PrefillRanks:
    """Sessions of one worker, one with each agent. A session that was lost is dialled again when needed.

    Parameters
    ----------
    agent
        Of this worker.
    timeout_s
        How long who asks waits for a session: its ``connect_timeout_s``.
    """

    def __init__(self, agent: kvxfer.Agent, timeout_s: float) -> None:
        self._agent = agent
        self._diallers = Diallers(self._connect, timeout_s)
        self._peers: dict[Entry, Future[kvxfer.Peer]] = {}
        self._looked_at = _MAX_LOST  # so many are looked through next

    def session(self, rank: Entry, request_id: str) -> Future[kvxfer.Peer]:
        """Returns a session with a rank, or one that is to be, for a request that names it."""
        future = self._peers.get(rank)
        if future is None or (future.done() and not is_open(future)):
            if len(self._peers) >= self._looked_at:
                self._forget_lost()
            future = self._diallers.dial(rank, request_id)
            self._peers[rank] = future
        return future

    def _connect(self, rank: Entry) -> kvxfer.Peer:
        if not is_some_agent(rank):
            return self._agent.connect_blocking(rank)
        peer = self._agent.connect_blocking(rank.address)
        if agents_of(engine_of(peer.name)) == rank.name:
            return peer
        peer.disconnect()
        raise kvxfer.PeerError(
            f"{peer.name} answers at {rank.address}, where the router says that {rank.name} is: name that "
            "engine's engine_id, host and port to the router",
            code="unreachable",
            peer=rank.name,
        )

    def _forget_lost(self) -> None:
        """Engines come and go for as long as this one serves."""
        for rank, future in list(self._peers.items()):
            if future.done() and not is_open(future):
                del self._peers[rank]
        self._looked_at = 2 * len(self._peers) + _MAX_LOST

    def close(self) -> None:
        """Stops dialling; sessions end with the agent."""
        self._diallers.close()


def is_open(future: Future[kvxfer.Peer]) -> bool:
    """Whether a session is there, and lasts."""
    if future.cancelled() or future.exception() is not None:
        return False
    return future.result().state is kvxfer.PeerState.OPEN
