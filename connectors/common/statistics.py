"""What a worker counts of its fetches and of what it keeps, on its way to the engine's log and metrics."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from kvxfer.handle import Stages

_log = logging.getLogger("kvxfer")

# One entry for each fetch that was loaded.
CONNECT_S: Final = "connect_s"
LOAD_S: Final = "load_s"
NOTICE_S: Final = "notice_s"
NBYTES: Final = "nbytes"
PAGES: Final = "num_pages"
_SERIES: Final = (CONNECT_S, LOAD_S, NOTICE_S, NBYTES, PAGES)
# How many: by rail, by code, and of what prefill counts.
RAILS: Final = "rails"
FAILURES: Final = "failures"
RECEIPTS: Final = "receipts"
EXPIRED: Final = "expired"
KEPT: Final = "kept"


@dataclass
class Counts:
    """What one worker, or all of them, counted in an interval.

    Attributes
    ----------
    data
        Dictionaries, lists, numbers and strings alone: it goes from process to process.
    """

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Starts an interval."""
        self.data = {name: [] for name in _SERIES}
        self.data |= {RAILS: {}, FAILURES: {}, RECEIPTS: 0, EXPIRED: 0, KEPT: None}

    def is_empty(self) -> bool:
        """Returns whether nothing has happened."""
        return self.data[KEPT] is None and not any(value for name, value in self.data.items() if name != KEPT)

    def add(self, theirs: dict[str, Any]) -> None:
        """Adds the data of another worker, or of what came later."""
        for name in _SERIES:
            self.data[name] = self.data[name] + theirs[name]
        for name in (RAILS, FAILURES):
            self.data[name] = _sum(self.data[name], theirs[name])
        for name in (RECEIPTS, EXPIRED):
            self.data[name] += theirs[name]
        if theirs[KEPT] is not None:
            self.data[KEPT] = theirs[KEPT]

    def reduce(self) -> dict[str, int | float]:
        """Returns what the engine's log line of an interval says."""
        loads, moved = self.data[LOAD_S], sum(self.data[NBYTES])
        said: dict[str, int | float] = {}
        if loads:
            said |= {
                "loads": len(loads),
                "load ms (median)": round(_quantile(loads, 0.5) * 1e3, 1),
                "load ms (p90)": round(_quantile(loads, 0.9) * 1e3, 1),
                "connect ms (p90)": round(_quantile(self.data[CONNECT_S], 0.9) * 1e3, 1),
                "notice ms (p90)": round(_quantile(self.data[NOTICE_S], 0.9) * 1e3, 1),
                "MB": round(moved / 1e6, 1),
                # Of the time that transfers took together: what one of them had.
                "MB/s of a load": round(moved / 1e6 / max(sum(loads), 1e-9), 1),
            }
        said |= {f"loads over {rail}": count for rail, count in sorted(self.data[RAILS].items())}
        said |= {f"failed, {code}": count for code, count in sorted(self.data[FAILURES].items())}
        if self.data[RECEIPTS] or self.data[EXPIRED]:
            said |= {"receipts": self.data[RECEIPTS], "expired": self.data[EXPIRED]}
        if self.data[KEPT] is not None:
            said["kept requests"] = self.data[KEPT]
        return said


class Recorder:
    """Counts for one worker, from one look of the engine to the next."""

    def __init__(self) -> None:
        self._current = Counts()
        self._kept_told = 0

    def loaded(
        self,
        request_id: str,
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
        began_ns, noticed_ns
            When it was ordered, and when a step of the engine saw its end.
        stages
            Of its transfers together; zeros where nothing was missing.
        rails
            Transports that moved bytes of it, each once.
        nbytes, num_pages, num_ranks
            What was read, and from how many prefill ranks.
        """
        posted_ns, ended_ns = stages.posted_ns or noticed_ns, stages.ended_ns or noticed_ns
        data = self._current.data
        data[CONNECT_S].append(max(posted_ns - began_ns, 0) / 1e9)
        data[LOAD_S].append(max(ended_ns - posted_ns, 0) / 1e9)
        data[NOTICE_S].append(max(noticed_ns - ended_ns, 0) / 1e9)
        data[NBYTES].append(nbytes)
        data[PAGES].append(num_pages)
        used = sorted(rails)
        data[RAILS] = _sum(data[RAILS], dict.fromkeys(used, 1))
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                "kvxfer: request %s: loaded %d bytes in %d pages from %d ranks over %s in %.1f ms, after "
                "%.1f ms of connecting; noticed %.1f ms later",
                request_id,
                nbytes,
                num_pages,
                num_ranks,
                "+".join(used) or "nothing",
                data[LOAD_S][-1] * 1e3,
                data[CONNECT_S][-1] * 1e3,
                data[NOTICE_S][-1] * 1e3,
            )

    def failed(self, code: str) -> None:
        """Counts a fetch that ended without its bytes; `code` is one word, as `KvxferError.code`."""
        self._current.data[FAILURES] = _sum(self._current.data[FAILURES], {code: 1})

    def received(self) -> None:
        """Counts a reader that has all of a request."""
        self._current.data[RECEIPTS] += 1

    def expired(self) -> None:
        """Counts a request that was kept in vain: not all of its readers came in time."""
        self._current.data[EXPIRED] += 1

    def take(self, num_kept: int) -> Counts | None:
        """Returns what was counted since the last call; None when nothing has happened.

        Parameters
        ----------
        num_kept
            Requests that this worker keeps for readers now.
        """
        if num_kept != self._kept_told:
            self._current.data[KEPT] = self._kept_told = num_kept
        if self._current.is_empty():
            return None
        taken, self._current = self._current, Counts()
        return taken


def _sum(ours: dict[str, int], theirs: dict[str, int]) -> dict[str, int]:
    return {name: ours.get(name, 0) + theirs.get(name, 0) for name in ours.keys() | theirs.keys()}


def _quantile(values: list[float], share: float) -> float:
    """Returns the smallest value that so large a share of all does not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]
