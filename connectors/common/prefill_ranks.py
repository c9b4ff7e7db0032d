"""Sessions with the agents of prefill engines: dialled when first needed, without stopping the engine."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import kvxfer
from kvxfer.connectors.common.handover import MAX_RANKS
from kvxfer.directory import Entry

# As many strangers are dialled at once, all that one request can name; a host that does not answer
# holds a thread for connect_timeout_s.
_NUM_DIALLERS: Final = MAX_RANKS


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
        self._timeout_s = timeout_s
        self._diallers = ThreadPoolExecutor(_NUM_DIALLERS, thread_name_prefix="kvxfer-dial")
        self._peers: dict[Entry, Future[kvxfer.Peer]] = {}

    def session(self, rank: Entry) -> Future[kvxfer.Peer]:
        """Returns a session with a rank, or one that is to be."""
        future = self._peers.get(rank)
        if future is None or (future.done() and not is_open(future)):
            self._forget_lost()
            future = self._diallers.submit(self._dial, rank, time.monotonic())
            self._peers[rank] = future
        return future

    def _dial(self, rank: Entry, asked_at: float) -> kvxfer.Peer:
        if time.monotonic() - asked_at > self._timeout_s:
            # Who asked has given up; those behind it in the queue have not.
            raise kvxfer.PeerError(
                f"{rank.address} was not dialled within {self._timeout_s:g} s: too many others were",
                code="unreachable",
                peer=rank.name,
            )
        return self._agent.connect_blocking(rank)

    def _forget_lost(self) -> None:
        """Engines come and go for as long as this one serves."""
        for rank, future in list(self._peers.items()):
            if future.done() and not is_open(future):
                del self._peers[rank]

    def close(self) -> None:
        """Stops dialling; sessions end with the agent."""
        self._diallers.shutdown(wait=False, cancel_futures=True)


def is_open(future: Future[kvxfer.Peer]) -> bool:
    """Whether a session is there, and lasts."""
    if future.cancelled() or future.exception() is not None:
        return False
    return future.result().state is kvxfer.PeerState.OPEN
