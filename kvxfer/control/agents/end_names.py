"""The names of the regions and peers that an agent's records give by number, even after these are gone."""

from __future__ import annotations

from typing import Any, Final

from kvxfer.control.agents.attached import Attached
from kvxfer.control.state.transfer_table import NO_NAMES, Names
from kvxfer.session.records import Record

# Names of regions and peers that are gone: the records of their last transfers may still arrive.
_MOST_GONE: Final = 4096
# Of one peer, which may register regions without end.
_MOST_REGIONS: Final = 256
_MOST_NAMES: Final = 4096


class EndNames:
    """The names in one agent's last reports."""

    def __init__(self) -> None:
        self._regions: dict[int, str] = {}
        # By session: the peer's incarnation, its name, and its regions.
        self._peers: dict[int, tuple[str, str, dict[int, str]]] = {}
        # Ends between the same regions share one tuple.
        self._names: dict[tuple[int, int, int], Names] = {}

    def learn(self, agent: Attached) -> None:
        """Reads the agent's current regions and peers; remembers those that are gone for a while."""
        self._names.clear()
        for region in agent.regions:
            self._regions[region["id"]] = region["name"]
        for peer in agent.peers:
            known = self._peers.get(peer["session"], ("", "", {}))[2]
            told = dict(zip(peer.get("region_ids", ()), peer.get("regions", ()), strict=False))
            regions = known | told if len(known) <= _MOST_REGIONS else told
            self._peers[peer["session"]] = (peer["incarnation"], peer["name"], regions)
        for kept, count in ((self._regions, len(agent.regions)), (self._peers, len(agent.peers))):
            _let_go_oldest(kept, _MOST_GONE + count)

    def peer(self, session: int) -> str:
        """Returns the incarnation of a session's peer; ``""`` if it was not reported yet."""
        return self._peers[session][0] if session in self._peers else ""

    def of(self, record: Record) -> Names:
        """Returns the names for the end that a record describes."""
        key = (record.session, record.region, record.remote_region)
        if (found := self._names.get(key)) is None:
            incarnation, name, regions = self._peers.get(record.session, ("", "", {}))
            found = (
                self._regions.get(record.region, ""),
                incarnation,
                name,
                regions.get(record.remote_region, ""),
            )
            if len(self._names) >= _MOST_NAMES:
                self._names.clear()
            self._names[key] = found = found if any(found) else NO_NAMES
        return found


def _let_go_oldest(kept: dict[int, Any], most: int) -> None:
    while len(kept) > most:
        del kept[next(iter(kept))]
