"""What every rank has to say before it counts: ranks agree at each step's end, as the engine does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvxfer.connectors.common.step import News, Step


@dataclass(frozen=True, slots=True)
class Said:
    """What one rank says.

    Attributes
    ----------
    received, sent
        Requests that are through here and may not be so elsewhere.
    failed
        Loads that have failed here, since the last step.
    news
        Of prompts that are kept here.
    step
        Of rank 0: what its scheduler asks of all ranks where the engine computes nothing, and does not ask.
    """

    received: frozenset[str]
    sent: frozenset[str]
    failed: frozenset[str]
    news: News
    step: Step | None = None


class Agreement:
    """One rank's part in it.

    Parameters
    ----------
    gather
        Gives every rank what all say, in the order of the ranks. All call it equally often.
    """

    def __init__(self, gather: Callable[[Said], list[Said]]) -> None:
        self._gather = gather
        self._received: set[str] = set()
        self._sent: set[str] = set()

    def reach(
        self, received: set[str], sent: set[str], failed: set[str], news: News, step: Step | None
    ) -> Said:
        """Returns what is so on every rank, what has failed on any, and what any has to tell."""
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
