"""Sessions with prefill's agents: dialled at first use, in threads, so that the engine does not wait."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Final

import kvxfer
from kvxfer.connectors.common.dialling import Diallers
from kvxfer.connectors.common.worker_rank import agents_of, engine_of, is_some_agent
from kvxfer.directory import Entry

# So many lost sessions may accumulate before a cleanup, because a cleanup visits every session.
_MAX_LOST: Final = 256


class PrefillRanks:
    """One worker's sessions, one with each agent. A lost session is dialled again at its next use.

    Parameters
    ----------
    agent
        Of this worker.
    timeout_s
        How long a caller waits for a session: its ``connect_timeout_s``.
    """

    def __init__(self, agent: kvxfer.Agent, timeout_s: float) -> None:
        self._agent = agent
        self._diallers = Diallers(self._connect, timeout_s)
        self._peers: dict[Entry, Future[kvxfer.Peer]] = {}
        self._looked_at = _MAX_LOST  # the number of sessions at which the next cleanup runs

    def session(self, rank: Entry, request_id: str) -> Future[kvxfer.Peer]:
        """Returns a future for the session with a rank that a request names; dials if there is none."""
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
            f"{peer.name} answers at {rank.address}, where the router expects {rank.name}: give the router "
            "that engine's engine_id, host and port",
            code="unreachable",
            peer=rank.name,
        )

    def _forget_lost(self) -> None:
        """Drops lost sessions; without this, engines that come and go would fill the table."""
        for rank, future in list(self._peers.items()):
            if future.done() and not is_open(future):
                del self._peers[rank]
        self._looked_at = 2 * len(self._peers) + _MAX_LOST

    def close(self) -> None:
        """Stops dialling; sessions end with the agent."""
        self._diallers.close()


def is_open(future: Future[kvxfer.Peer]) -> bool:
    """Whether a session was opened and is not lost."""
    if future.cancelled() or future.exception() is not None:
        return False
    return future.result().state is kvxfer.PeerState.OPEN
