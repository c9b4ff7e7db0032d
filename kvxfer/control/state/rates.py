"""Limits of each caller: token buckets for requests, and counts of what a caller has open."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

# The caller that was idle for longest is forgotten first, and then starts with a full bucket.
_MAX_CALLERS: Final = 4096


class Rates:
    """Token buckets by caller: `rate` tokens a second, and at most `burst` at once."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key: str, now_s: float) -> float:
        """Takes a token and returns 0; or takes none, and returns in how many seconds there is one."""
        level, at_s = self._levels.pop(key, (self._burst, now_s))
        level = min(self._burst, level + (now_s - at_s) * self._rate)
        wait_s = 0.0 if level >= 1 else (1 - level) / self._rate
        self._levels[key] = (level if wait_s else level - 1, now_s)
        if len(self._levels) > _MAX_CALLERS:
            self._levels.popitem(last=False)
        return wait_s


class OpenCounts:
    """How many things of one kind each caller has open, with a bound for each caller and one for all."""

    def __init__(self, most_each: int, most: int) -> None:
        self._most_each = most_each
        self._most = most
        self._counts: dict[str, int] = {}
        self.total = 0

    def enter(self, key: str) -> bool:
        """Counts one more and returns True, or returns False if a bound is reached."""
        count = self._counts.get(key, 0)
        if count >= self._most_each or self.total >= self._most:
            return False
        self._counts[key] = count + 1
        self.total += 1
        return True

    def leave(self, key: str) -> None:
        """Counts one less."""
        self.total -= 1
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]
