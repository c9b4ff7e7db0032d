"""Counters of fetches and kept requests, for the engine's log and metrics."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from kvxfer.handle import Stages

_log = logging.getLogger("kvxfer")

# The mode of a fetch. The time of a push includes prefill's forward, so it is never mixed with a pull's.
PULL: Final = "pull"
PUSH: Final = "push"
RETURN: Final = "return"
NO_MODE: Final = "none"  # the request's parameters cannot be used
# By mode: lists with one entry for each successful fetch.
CONNECT_S: Final = "connect_s"
LOAD_S: Final = "load_s"
NOTICE_S: Final = "notice_s"
NBYTES: Final = "nbytes"
PAGES: Final = "num_pages"
# Numbers: by mode and by rail or code; then those of prefill; then that of the scheduler half.
RAILS: Final = "rails"
FAILURES: Final = "failures"
_BY_MODE: Final = (CONNECT_S, LOAD_S, NOTICE_S, NBYTES, PAGES, RAILS, FAILURES)
RECEIPTS: Final = "receipts"
EXPIRED: Final = "expired"
GAVE_WAY: Final = "gave_way"
UNTRANSFERRED: Final = "untransferred"
_NUMBERS: Final = (RECEIPTS, EXPIRED, GAVE_WAY, UNTRANSFERRED)
KEPT: Final = "kept"  # a gauge: the newest value, not a sum


@dataclass
class Counts:
    """The counts of one worker or scheduler half, or of all of them, in an interval.

    Attributes
    ----------
    data
        Only dictionaries, lists, numbers and strings, because it is sent between processes.
    """

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Starts an interval."""
        self.data = {name: {} for name in _BY_MODE}
        self.data |= dict.fromkeys(_NUMBERS, 0)
        self.data[KEPT] = None

    def is_empty(self) -> bool:
        """Returns whether nothing was counted."""
        return self.data[KEPT] is None and not any(value for name, value in self.data.items() if name != KEPT)

    def add(self, theirs: dict[str, Any]) -> None:
        """Adds the data of another worker or of a later interval."""
        for name in (*_BY_MODE, *_NUMBERS):
            self.data[name] = _sum(self.data[name], theirs[name])
        if theirs[KEPT] is not None:
            self.data[KEPT] = theirs[KEPT]

    def reduce(self) -> dict[str, int | float]:
        """Returns the entries of the engine's log line for an interval."""
        said: dict[str, int | float] = {}
        for mode, loads in sorted(self.data[LOAD_S].items()):
            connects, notices = self.data[CONNECT_S][mode], self.data[NOTICE_S][mode]
            moved = sum(self.data[NBYTES][mode])
            said |= {
                f"{mode} loads": len(loads),
                f"{mode} load ms (median)": round(_quantile(loads, 0.5) * 1e3, 1),
                f"{mode} load ms (p90)": round(_quantile(loads, 0.9) * 1e3, 1),
                f"{mode} connect ms (p90)": round(_quantile(connects, 0.9) * 1e3, 1),
                f"{mode} notice ms (p90)": round(_quantile(notices, 0.9) * 1e3, 1),
                f"{mode} MB": round(moved / 1e6, 1),
            }
            if mode != PUSH:
                # Bytes divided by the sum of all load times: the mean rate of one load.
                said[f"{mode} MB/s of a load"] = round(moved / 1e6 / max(sum(loads), 1e-9), 1)
        for words, name in (("loads over", RAILS), ("failed,", FAILURES)):
            for mode, counts in sorted(self.data[name].items()):
                said |= {f"{mode} {words} {each}": count for each, count in sorted(counts.items())}
        if self.data[RECEIPTS] or self.data[EXPIRED]:
            said |= {"receipts": self.data[RECEIPTS], "expired": self.data[EXPIRED]}
        if self.data[GAVE_WAY]:
            said["gave way"] = self.data[GAVE_WAY]
        if self.data[UNTRANSFERRED]:
            said["came without a cache"] = self.data[UNTRANSFERRED]
        if self.data[KEPT] is not None:
            said["kept requests"] = self.data[KEPT]
        return said


class Recorder:
    """Counts for one worker or scheduler half, until the engine takes the counts."""

    def __init__(self) -> None:
        self._current = Counts()
        self._kept_reported = 0

    def loaded(
        self,
        request_id: str,
        mode: str,
        *,
        began_ns: int,
        noticed_ns: int,
        stages: Stages,
        rails: Iterable[str],
        nbytes: int,
        num_pages: int,
        num_ranks: int,
    ) -> None:
        """Counts a fetch whose bytes are all in place.

        Parameters
        ----------
        mode
            The fetch's mode.
        began_ns, noticed_ns
            When it was ordered, and when a step of the engine noticed its end.
        stages
            The stages of all its transfers together; zeros if nothing was missing.
        rails
            The transports that moved its bytes, each once.
        nbytes, num_pages, num_ranks
            How much was fetched, and from how many prefill ranks.
        """
        posted_ns, ended_ns = stages.posted_ns or noticed_ns, stages.ended_ns or noticed_ns
        connect_s = max(posted_ns - began_ns, 0) / 1e9
        load_s = max(ended_ns - posted_ns, 0) / 1e9
        notice_s = max(noticed_ns - ended_ns, 0) / 1e9
        used = sorted(rails)
        self._add(CONNECT_S, {mode: [connect_s]})
        self._add(LOAD_S, {mode: [load_s]})
        self._add(NOTICE_S, {mode: [notice_s]})
        self._add(NBYTES, {mode: [nbytes]})
        self._add(PAGES, {mode: [num_pages]})
        self._add(RAILS, {mode: dict.fromkeys(used, 1)})
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                "kvxfer: request %s: loaded (%s) %d bytes in %d pages from %d ranks over %s in %.1f ms, "
                "after %.1f ms of connecting; noticed %.1f ms later",
                request_id,
                mode,
                nbytes,
                num_pages,
                num_ranks,
                "+".join(used) or "nothing",
                load_s * 1e3,
                connect_s * 1e3,
                notice_s * 1e3,
            )

    def failed(self, mode: str, code: str) -> None:
        """Counts a fetch that ended without its bytes; `code` is one word, as `KvxferError.code`."""
        self._add(FAILURES, {mode: {code: 1}})

    def received(self) -> None:
        """Counts a reader that has everything of a request."""
        self._add(RECEIPTS, 1)

    def expired(self) -> None:
        """Counts a request whose readers did not all come in time."""
        self._add(EXPIRED, 1)

    def gave_way(self) -> None:
        """Counts a request that gave way, because other requests needed its blocks."""
        self._add(GAVE_WAY, 1)

    def untransferred(self) -> None:
        """Counts a request that came to decode and named no cache."""
        self._add(UNTRANSFERRED, 1)

    def keeps(self, num_requests: int) -> None:
        """Sets how many requests are kept for readers; reported only when the number changes."""
        if num_requests != self._kept_reported:
            self._current.data[KEPT] = self._kept_reported = num_requests

    def take(self) -> Counts | None:
        """Returns the counts since the last call; None if nothing was counted."""
        if self._current.is_empty():
            return None
        taken, self._current = self._current, Counts()
        return taken

    def _add(self, name: str, value: Any) -> None:
        self._current.data[name] = _sum(self._current.data[name], value)


def _sum(ours: Any, theirs: Any) -> Any:
    """Adds numbers, concatenates lists, and merges dictionaries of them name by name."""
    if not isinstance(ours, dict):
        return ours + theirs
    both = {name: _sum(value, theirs[name]) if name in theirs else value for name, value in ours.items()}
    return {**theirs, **both}


def _quantile(values: list[float], share: float) -> float:
    """Returns the quantile: the smallest value that at least `share` of all values do not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]
