"""Estimates how long fetches and the engine's steps take, from the last ones."""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final

_NUM_KEPT: Final = 8
_MAX_SOURCES: Final = 1024


class StepPace:
    """Decides how long a step should wait for fetches: the wait delays all running requests."""

    def __init__(self) -> None:
        self._taken: deque[float] = deque(maxlen=2 * _NUM_KEPT)
        self._ended_s: float | None = None

    def ended(self, now_s: float, num_running: int) -> None:
        """Records the end of a step in which `num_running` requests were computed."""
        if self._ended_s is not None and num_running:
            self._taken.append(now_s - self._ended_s)
        # After a step that computes nothing the engine may sleep, so the next interval does not count.
        self._ended_s = now_s if num_running else None

    def worth(self, expected_s: Sequence[float], num_running: int, most_s: float) -> tuple[int, float]:
        """Returns for how many of a step's new fetches it should wait, the quickest first, and how long.

        A fetch that ends in this step instead of the next saves its request one step. Meanwhile all running
        requests wait. So the wait, times the running requests, must not exceed the step time, times the
        awaited fetches. With no running request, a request that arrives during the wait is delayed as by a
        step.

        Parameters
        ----------
        expected_s
            The expected time of each fetch, ascending.
        num_running
            Requests that are computed in the step.
        most_s
            The longest wait.
        """
        step_s = statistics.median(self._taken) if self._taken else 0.0
        worth = 0, 0.0
        for count, seconds in enumerate(expected_s, 1):
            limit_s = min(most_s, step_s * count / max(num_running, 1))
            if seconds <= limit_s:
                worth = count, limit_s
        return worth


class Pace:
    """Predicts the time of a fetch from the last fetches from the same engine."""

    def __init__(self) -> None:
        self._taken: OrderedDict[str, deque[tuple[int, float]]] = OrderedDict()

    def took(self, source: str, nbytes: int, seconds: float) -> None:
        """Records the time of a fetch, from its posting to its last byte."""
        taken = self._taken.setdefault(source, deque(maxlen=_NUM_KEPT))
        taken.append((nbytes, seconds))
        self._taken.move_to_end(source)
        if len(self._taken) > _MAX_SOURCES:
            self._taken.popitem(last=False)  # drops engines that have gone

    def forget(self, source: str) -> None:
        """Forgets a source's times, because a fetch from it has failed."""
        self._taken.pop(source, None)

    def expected_s(self, source: str, nbytes: int) -> float:
        """Returns the median time that the last fetches would have taken for `nbytes`; infinity if unknown.

        A smaller fetch is expected to take as long as the recorded one, because latency dominates small ones.
        A larger fetch takes longer in proportion.
        """
        taken = self._taken.get(source)
        if not taken:
            return math.inf
        return statistics.median(seconds * max(1.0, nbytes / max(known, 1)) for known, seconds in taken)
