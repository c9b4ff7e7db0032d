"""Transfer rates between agents, from the events of ended transfers. Pure: `now_s` is an argument."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

#: The time over which rates are averaged.
WINDOW_S: Final = 5.0
_MOST: Final = 200_000
_LEAST_S: Final = 1.0


class LinkRate(NamedTuple):
    """Of one direction between two agents, named by the first 16 digits of their ids."""

    source: str
    destination: str
    bytes_per_s: float
    transfers_per_s: float


class LiveRates:
    """Adds up the bytes of the last seconds; counts each transfer once, though both ends report it."""

    def __init__(self, begun_s: float, window_s: float = WINDOW_S) -> None:
        self._begun_s = begun_s
        self._window_s = window_s
        self._ended: deque[tuple[float, str, str, str, int]] = deque()
        self._seen: set[str] = set()

    def add(self, data: Mapping[str, Any], now_s: float) -> None:
        """Adds the data of a ``transfers.done`` event."""
        id_, agent, role = str(data["id"]), str(data["agent"])[:16], data["role"]
        if role not in ("source", "destination") or id_ in self._seen or len(self._ended) >= _MOST:
            return
        one, other = [*id_.split("-"), ""][:2]
        peer = other if one == agent else one
        source, destination = (agent, peer) if role == "source" else (peer, agent)
        self._seen.add(id_)
        self._ended.append((now_s, id_, source, destination, int(data["nbytes"])))

    def links(self, now_s: float) -> list[LinkRate]:
        """Returns the rates of all links with transfers in the window, the fastest first."""
        while self._ended and self._ended[0][0] < now_s - self._window_s:
            self._seen.discard(self._ended.popleft()[1])
        nbytes: Counter[tuple[str, str]] = Counter()
        counts: Counter[tuple[str, str]] = Counter()
        for _, _, source, destination, moved in self._ended:
            nbytes[source, destination] += moved
            counts[source, destination] += 1
        # Just after the start, less time than the window has passed.
        window_s = min(self._window_s, max(_LEAST_S, now_s - self._begun_s))
        found = [LinkRate(*link, nbytes[link] / window_s, counts[link] / window_s) for link in counts]
        return sorted(found, key=lambda link: (-link.bytes_per_s, link.source, link.destination))
