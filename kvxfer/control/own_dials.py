"""Connecting for requests: one dial for all who ask for an agent, and a bound of those that do not answer."""

from __future__ import annotations

import asyncio
from typing import Final

from kvxfer.agent import Agent
from kvxfer.errors import PeerError
from kvxfer.peer import Peer, PeerState

# Addresses come from requests, and one that does not answer takes a descriptor for as long as connecting may.
_MOST_DIALS: Final = 64
_MOST_DIALS_OF_HOST: Final = 16


class OwnDials:
    """Those of one agent."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._under_way: dict[str, asyncio.Task[Peer]] = {}
        self._of_host: dict[str, int] = {}
        self._at_address: dict[str, Peer] = {}

    def cancel(self) -> None:
        """Gives up what is under way."""
        for dial in list(self._under_way.values()):
            dial.cancel()

    async def dial(self, key: str, target: str, host: str) -> Peer:
        """Returns the session of all who ask for one target; who is cancelled leaves it to the others.

        Parameters
        ----------
        key, host
            Under which the session is known afterwards, and whose bound counts.
        target
            As `Agent.connect` takes it.

        Raises
        ------
        PeerError
            As that does; ``unreachable`` also where too many others are being dialled.
        """
        known = self._at_address.get(key)
        if known is not None:
            if known.state is PeerState.OPEN:
                return known
            del self._at_address[key]
        dial = self._under_way.get(key)
        if dial is None:
            if len(self._under_way) >= _MOST_DIALS or self._of_host.get(host, 0) >= _MOST_DIALS_OF_HOST:
                raise PeerError(
                    f"{target} is not dialled: too many others are, and do not answer; ask again later",
                    code="unreachable",
                )
            dial = asyncio.create_task(self.agent.connect(target), name=f"dial {target}")
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
