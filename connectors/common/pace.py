"""How long caches take to come and steps of the engine to end, by what the last ones took."""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final

_NUM_KEPT: Final = 8
_MAX_SOURCES: Final = 1024


class StepPace:
    """Says for how long waiting in a step is worth it: what one request wins by it, others pay for."""

    def __init__(self) -> None:
        self._taken: deque[float] = deque(maxlen=2 * _NUM_KEPT)
        self._ended_s: float | None = None

    def ended(self, now_s: float, num_running: int) -> None:
        """Takes in that a step has ended, in which so many requests were computed."""
        if self._ended_s is not None and num_running:
            self._taken.append(now_s - self._ended_s)
        # Behind a step that computes nothing the engine may sleep.
        self._ended_s = now_s if num_running else None

    def worth(self, expected_s: Sequence[float], num_running: int, most_s: float) -> tuple[int, float]:
        """Returns for how many of a step's new fetches it should wait, the quickest first, and how long.

        A cache that is seen in this step and not in the next spares its request a step; all that are
        computed here wait meanwhile. So many seconds in total are not more than so many steps. Where none is
        computed, a request that comes meanwhile waits as it would for a step.

        Parameters
        ----------
        expected_s
            What each is expected to take, ascending.
        num_running
            Requests that are computed in the step.
        most_s
            What it waits at most.
        """
        step_s = statistics.median(self._taken) if self._taken else 0.0
        worth = 0, 0.0
        for count, seconds in enumerate(expected_s, 1):
            limit_s = min(most_s, step_s * count / max(num_running, 1))
            if seconds <= limit_s:
                worth = count, limit_s
        return worth


class Pace:
    """Expects of the next fetch what the last ones from the same engine took."""

    def __init__(self) -> None:
        self._taken: OrderedDict[str, deque[tuple[int, float]]] = OrderedDict()

    def took(self, source: str, nbytes: int, seconds: float) -> None:
        """Takes in what a fetch took, from its posting to its last byte."""
        taken = self._taken.setdefault(source, deque(maxlen=_NUM_KEPT))
        taken.append((nbytes, seconds))
        self._taken.move_to_end(source)
        if len(self._taken) > _MAX_SOURCES:
            self._taken.popitem(last=False)  # of engines that came and went

    def forget(self, source: str) -> None:
        """Expects nothing of a source any more: a fetch from it has failed."""
        self._taken.pop(source, None)

    def expected_s(self, source: str, nbytes: int) -> float:
        """Returns the median of what so many bytes would have taken; infinity where nothing is known.

        Fewer bytes than a fetch had are expected to take as long, since most of a small one is its way;
        more take longer in proportion.
        """
        taken = self._taken.get(source)
        if not taken:
            return math.inf
        return statistics.median(seconds * max(1.0, nbytes / max(known, 1)) for known, seconds in taken)
