"""Agreement among the ranks at each step's end: an event counts when every rank has reported it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvxfer.connectors.common.step import News, Step


@dataclass(frozen=True, slots=True)
class Said:
    """The report of one rank.

    Attributes
    ----------
    received, sent
        Requests that have ended on this rank, and perhaps not on others.
    failed
        Loads that have failed on this rank since the last step.
    news
        News of prompts that are kept on this rank.
    step
        Only from rank 0: the scheduler's orders for all ranks in a step that computes nothing, because the
        engine does not ask the scheduler then.
    """

    received: frozenset[str]
    sent: frozenset[str]
    failed: frozenset[str]
    news: News
    step: Step | None = None


class Agreement:
    """One rank's side of the agreement.

    Parameters
    ----------
    gather
        Returns the reports of all ranks, in the order of the ranks. All ranks must call it equally often.
    """

    def __init__(self, gather: Callable[[Said], list[Said]]) -> None:
        self._gather = gather
        self._received: set[str] = set()
        self._sent: set[str] = set()

    def reach(
        self, received: set[str], sent: set[str], failed: set[str], news: News, step: Step | None
    ) -> Said:
        """Returns the requests that ended on every rank, the loads that failed on any, and all news."""
        self._received |= received
        self._sent |= sent
        own = Said(frozenset(self._received), frozenset(self._sent), frozenset(failed), news, step)
        said = self._gather(own)
        everywhere = Said(
            frozenset.intersection(*(each.received for each in said)),
            frozenset.intersection(*(each.sent for each in said)),
            frozenset().union(*(each.failed for each in said)),
            _all(each.news for each in said),
            next((each.step for each in said if each.step is not None), None),
        )
        self._received -= everywhere.received
        self._sent -= everywhere.sent
        return everywhere


def _all(news: Any) -> News:
    together = News()
    for each in news:
        together |= each
    return together
