"""Decode's sessions with prefill ranks, and the choice of the rank that sends each region."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import kvxfer
from kvxfer.connectors.common.bounded_table import remember
from kvxfer.connectors.common.regions import remote_region
from kvxfer.peer import session_with


class Refused(NamedTuple):
    """Why a rank opened no session, and when its answer came, by `time.monotonic`."""

    at: float
    reason: str


class Source(NamedTuple):
    """A prefill rank that sends a part of a request.

    Attributes
    ----------
    cp_rank
        Its rank in context parallelism, which divides a prompt's pages among ranks.
    """

    peer: kvxfer.Peer
    cp_rank: int


class Sources:
    """The sessions that prefill's ranks opened on request, by the names of the ranks' agents."""

    def __init__(self, agent: kvxfer.Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._peers: dict[str, kvxfer.Peer] = {}
        self._refused: dict[str, Refused] = {}
        self._brings: dict[tuple[int, ...], list[tuple[str, ...]]] = {}

    def find(self, name: str) -> kvxfer.Peer | None:
        """Returns the open session with an agent; None if there is none."""
        peer = self._peers.get(name)
        if peer is None or peer.state is not kvxfer.PeerState.OPEN:
            peer = session_with(self._agent.peers, name)
            if peer is not None:
                remember(self._peers, name, peer)
        return peer

    def was_lost(self, name: str) -> bool:
        """Whether a session with an agent existed and is lost now."""
        return name in self._peers and self.find(name) is None

    def refused(self, name: str, reason: str) -> None:
        """Stores why an agent opens no session."""
        with self._lock:
            remember(self._refused, name, Refused(time.monotonic(), reason))

    def refusal_since(self, name: str, asked_at: float) -> str:
        """Returns why an agent that was asked at `asked_at` opened no session; "" if it did not answer."""
        refused = self._refused.get(name)
        return refused.reason if refused is not None and refused.at >= asked_at else ""

    def brings(
        self, sources: Sequence[Source], regions: Mapping[str, kvxfer.Region], divided: frozenset[str]
    ) -> list[tuple[str, ...]]:
        """Returns for each source the regions that it is to send, so that each byte comes once.

        Parameters
        ----------
        regions
            This rank's regions.
        divided
            Names of regions whose blocks context parallelism divides. The first context-parallel rank has all
            blocks of the others.

        Raises
        ------
        kvxfer.UsageError
            ``layout-mismatch`` or ``unknown-region``: the sources' caches do not fit this rank's.
        kvxfer.PeerError
            A session is lost.
        """
        key = (*(source.peer.id for source in sources), *(region.id for region in regions.values()))
        if key not in self._brings:
            remember(self._brings, key, _shares(sources, regions, divided))
        return self._brings[key]


def _shares(
    sources: Sequence[Source], regions: Mapping[str, kvxfer.Region], divided: frozenset[str]
) -> list[tuple[str, ...]]:
    found: list[list[str]] = [[] for _ in sources]
    cp_ranks = sorted({source.cp_rank for source in sources})
    for name, region in regions.items():
        for cp_rank in cp_ranks if name in divided else cp_ranks[:1]:
            holders = [index for index, source in enumerate(sources) if source.cp_rank == cp_rank]
            layouts = [remote_region(sources[index].peer, name).layout for index in holders]
            elected = {share.src for share in kvxfer.plan.route(layouts, [region.layout])}
            for position in sorted(elected):
                found[holders[position]].append(name)
    return [tuple(names) for names in found]
