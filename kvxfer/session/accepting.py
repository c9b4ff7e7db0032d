"""Accepting: waits for a session with a peer; either side may have called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.session.completion import ANY, Completions

if TYPE_CHECKING:
    from kvxfer.peer import Peer
    from kvxfer.session.peer_table import PeerTable


class Accepting:
    """Waits for one peer: `wait` or `wait_blocking`.

    Parameters
    ----------
    completions, peers, agent_name, address
        The agent's.
    name
        The peer's name; None for the next peer that calls.
    """

    def __init__(
        self, completions: Completions, peers: PeerTable, agent_name: str, address: str, name: str | None
    ) -> None:
        self._completions = completions
        self._peers = peers
        self._agent_name = agent_name
        self._address = address
        self._name = name
        self._found: Peer | None = None

    async def wait(self, timeout_s: float | None) -> Peer:
        """Returns the peer once its session is open, or raises `TimeoutError`."""
        if not await self._completions.until(("peer", ANY), self._find, timeout_s):
            raise self._nobody_came(timeout_s)
        assert self._found is not None
        return self._found

    def wait_blocking(self, timeout_s: float | None) -> Peer:
        """Returns the same: the blocking twin of `wait`."""
        if not self._completions.block_until(self._find, timeout_s):
            raise self._nobody_came(timeout_s)
        assert self._found is not None
        return self._found

    # ---- inside -----------------------------------------------------------------------------

    def _find(self) -> bool:
        self._found = self._peers.next_caller() if self._name is None else self._peers.find(self._name)
        return self._found is not None

    def _nobody_came(self, timeout_s: float | None) -> TimeoutError:
        who = "no peer has" if self._name is None else f"{self._name} has not"
        return TimeoutError(
            f"{who} connected to {self._agent_name} within {timeout_s} s (timeout_s); peers reach it at "
            f"{self._address or 'no address'}"
        )
