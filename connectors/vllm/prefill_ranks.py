"""Sessions with the agents of prefill engines: dialled when first needed, without stopping the engine."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import kvxfer
from kvxfer.connectors.vllm.handover import Rank

# As many strangers are dialled at once; one that does not answer holds one for connect_timeout_s.
_NUM_DIALLERS = 4


class PrefillRanks:
    """Sessions of one worker, by address. A session that was lost is dialled again when needed."""

    def __init__(self, agent: kvxfer.Agent) -> None:
        self._agent = agent
        self._diallers = ThreadPoolExecutor(_NUM_DIALLERS, thread_name_prefix="kvxfer-dial")
        self._peers: dict[Rank, Future[kvxfer.Peer]] = {}

    def session(self, rank: Rank) -> Future[kvxfer.Peer]:
        """Returns a session with a rank, or one that is to be."""
        future = self._peers.get(rank)
        if future is None or (future.done() and not is_open(future)):
            self._forget_lost()
            future = self._diallers.submit(self._dial, rank)
            self._peers[rank] = future
        return future

    def _dial(self, rank: Rank) -> kvxfer.Peer:
        peer = self._agent.connect_blocking(rank.address)
        if peer.name != rank.name:
            # Another engine got the port of one that is gone.
            peer.disconnect()
            raise kvxfer.PeerError(
                f"{rank.address} is {peer.name!r} now, the request was prefilled by {rank.name!r}",
                code="peer-restarted",
                peer=rank.name,
            )
        return peer

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
    try:
        return future.result().state == "open"
    except kvxfer.KvxferError:
        return False  # so long lost that the agent has forgotten it
