"""Connecting for requests: callers share one dial to an agent, and unanswered dials are bounded."""

from __future__ import annotations

import asyncio
from typing import Final

from kvxfer.agent import Agent
from kvxfer.control.state.descriptors import at_most
from kvxfer.directory.entry import Entry
from kvxfer.errors import PeerError
from kvxfer.peer import Peer, PeerState

# Addresses come from requests. One that does not answer takes a descriptor until the connect fails. So a host
# has few, and all together have enough that some hosts without an answer do not keep out the others.
_MOST_DIALS: Final = 512
_MOST_DIALS_OF_HOST: Final = 16


class OwnDials:
    """The dials of one agent."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._under_way: dict[str, asyncio.Task[Peer]] = {}
        self._of_host: dict[str, int] = {}
        self._at_address: dict[str, Peer] = {}

    def cancel(self) -> None:
        """Cancels all dials in progress."""
        for dial in list(self._under_way.values()):
            dial.cancel()

    async def dial(self, key: str, target: str | Entry, host: str) -> Peer:
        """Returns the session with one target; callers share one dial, and cancelling one does not end it.

        Parameters
        ----------
        key, host
            The key under which the session is kept, and the host for which dials are bounded.
        target
            As for `Agent.connect`.

        Raises
        ------
        PeerError
            As for `Agent.connect`; ``unreachable`` also if too many other agents are being dialled.
        """
        known = self._at_address.get(key)
        if known is not None:
            if known.state is PeerState.OPEN:
                return known
            del self._at_address[key]
        dial = self._under_way.get(key)
        if dial is None:
            of_host = self._of_host.get(host, 0)
            if len(self._under_way) >= at_most(_MOST_DIALS) or of_host >= _MOST_DIALS_OF_HOST:
                raise PeerError(
                    f"{_words(target)} is not dialled: {of_host} dials of this host, and "
                    f"{len(self._under_way)} of all, wait for an answer; try again later",
                    code="unreachable",
                )
            dial = asyncio.create_task(self.agent.connect(target), name=f"dial {_words(target)}")
            self._under_way[key] = dial
            self._of_host[host] = self._of_host.get(host, 0) + 1
            dial.add_done_callback(lambda done: self._has_dialled(key, host, done))
        return await asyncio.shield(dial)

    def _has_dialled(self, key: str, host: str, dial: asyncio.Task[Peer]) -> None:
        del self._under_way[key]
        self._of_host[host] -= 1
        if not self._of_host[host]:
            del self._of_host[host]
        if not dial.cancelled() and dial.exception() is None:
            self._at_address = {
                at: peer for at, peer in self._at_address.items() if peer.state is PeerState.OPEN
            }
            self._at_address[key] = dial.result()


def _words(target: str | Entry) -> str:
    return target if isinstance(target, str) else f"{target.name} at {target.address}"
