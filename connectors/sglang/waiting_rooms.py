"""Rooms for which decode's ranks have named pages, and whose request may never come to this rank.

Any host that reaches the control socket can name pages, so all that waits has one budget.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

_MAX_NBYTES: Final = 64 << 20
# A message counts at least so many bytes, for the objects that hold it.
_LEAST_NBYTES: Final = 4096


@dataclass(slots=True)
class _Room:
    since: float
    nbytes: Counter[str] = field(default_factory=Counter)  # by holder


class WaitingRooms:
    """The rooms without a sender, with their age and the bytes that are kept for them.

    Parameters
    ----------
    clock
        A monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rooms: dict[int, _Room] = {}
        self._of_holder: dict[str, dict[int, None]] = {}  # in the order of their first bytes
        self._nbytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._rooms)

    @property
    def nbytes(self) -> int:
        """The bytes that count against the budget."""
        return self._nbytes.total()

    def begin(self, room: int) -> None:
        """Adds a room, if it is new."""
        self._rooms.setdefault(room, _Room(self._clock()))

    def hold(self, room: int, holder: str, nbytes: int) -> list[int]:
        """Counts what a message makes this rank keep for a room.

        `holder` is the agent with a session that named the pages; all messages without a session have one
        holder, ``""``. Returns the rooms that must go, which count no more: beyond the budget, the oldest
        rooms of the holder with the most bytes.
        """
        self.begin(room)
        nbytes = max(nbytes, _LEAST_NBYTES)
        self._rooms[room].nbytes[holder] += nbytes
        self._nbytes[holder] += nbytes
        self._of_holder.setdefault(holder, {})[room] = None
        given_up = []
        while self._nbytes.total() > _MAX_NBYTES:
            largest = max(self._nbytes, key=self._nbytes.__getitem__)
            given_up.append(next(iter(self._of_holder[largest])))
            self.end(given_up[-1])
        return given_up

    def end(self, room: int) -> None:
        """Removes a room, whose request came or whose state was dropped."""
        if (ended := self._rooms.pop(room, None)) is None:
            return
        for holder, nbytes in ended.nbytes.items():
            self._nbytes[holder] -= nbytes
            del self._of_holder[holder][room]
            if not self._of_holder[holder]:
                del self._of_holder[holder], self._nbytes[holder]

    def older_than(self, age_s: float) -> list[int]:
        """Returns the rooms that have waited longer."""
        before = self._clock() - age_s
        return [room for room, each in self._rooms.items() if each.since < before]
