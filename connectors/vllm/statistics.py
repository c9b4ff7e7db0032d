"""What a worker counts of its fetches and of what it keeps, on its way to the engine's log and metrics."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvxfer.handle import Stages

_log = logging.getLogger("kvxfer")

# One entry for each fetch that was loaded.
_CONNECT_S: Final = "connect_s"
_LOAD_S: Final = "load_s"
_NOTICE_S: Final = "notice_s"
_NBYTES: Final = "nbytes"
_PAGES: Final = "num_pages"
_SERIES: Final = (_CONNECT_S, _LOAD_S, _NOTICE_S, _NBYTES, _PAGES)
# How many: by rail, by code, and of what prefill counts.
_RAILS: Final = "rails"
_FAILURES: Final = "failures"
_RECEIPTS: Final = "receipts"
_EXPIRED: Final = "expired"
_KEPT: Final = "kept"

# From one hop between processes to the default deadline of a fetch.
_SECONDS_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# From a page to the prompt of a long context: 4 KiB to 64 GiB.
_NBYTES_BUCKETS: Final = tuple(float(4**exponent) for exponent in range(6, 19))


@dataclass
class TransferStatistics(KVConnectorStats):
    """What one worker, or all of them, counted in an interval.

    ``data`` is made of dictionaries, lists, numbers and strings alone: it goes from process to process.
    """

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Starts an interval."""
        self.data: dict[str, Any] = {name: [] for name in _SERIES}
        self.data |= {_RAILS: {}, _FAILURES: {}, _RECEIPTS: 0, _EXPIRED: 0, _KEPT: None}

    def is_empty(self) -> bool:
        """Returns whether nothing has happened."""
        return self.data[_KEPT] is None and not any(
            value for name, value in self.data.items() if name != _KEPT
        )

    def aggregate(self, other: KVConnectorStats) -> TransferStatistics:
        """Adds another worker's, or what came later."""
        theirs = other.data
        for name in _SERIES:
            self.data[name] = self.data[name] + theirs[name]
        for name in (_RAILS, _FAILURES):
            self.data[name] = _sum(self.data[name], theirs[name])
        for name in (_RECEIPTS, _EXPIRED):
            self.data[name] += theirs[name]
        if theirs[_KEPT] is not None:
            self.data[_KEPT] = theirs[_KEPT]
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns what the engine's log line of an interval says."""
        loads, moved = self.data[_LOAD_S], sum(self.data[_NBYTES])
        said: dict[str, int | float] = {}
        if loads:
            said |= {
                "loads": len(loads),
                "load ms (median)": round(_quantile(loads, 0.5) * 1e3, 1),
                "load ms (p90)": round(_quantile(loads, 0.9) * 1e3, 1),
                "connect ms (p90)": round(_quantile(self.data[_CONNECT_S], 0.9) * 1e3, 1),
                "notice ms (p90)": round(_quantile(self.data[_NOTICE_S], 0.9) * 1e3, 1),
                "MB": round(moved / 1e6, 1),
                # Of the time that transfers took together: what one of them had.
                "MB/s of a load": round(moved / 1e6 / max(sum(loads), 1e-9), 1),
            }
        said |= {f"loads over {rail}": count for rail, count in sorted(self.data[_RAILS].items())}
        said |= {f"failed, {code}": count for code, count in sorted(self.data[_FAILURES].items())}
        if self.data[_RECEIPTS] or self.data[_EXPIRED]:
            said |= {"receipts": self.data[_RECEIPTS], "expired": self.data[_EXPIRED]}
        if self.data[_KEPT] is not None:
            said["kept requests"] = self.data[_KEPT]
        return said


class Recorder:
    """Counts for one worker, from one look of the engine to the next."""

    def __init__(self) -> None:
        self._current = TransferStatistics()
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
        data[_CONNECT_S].append(max(posted_ns - began_ns, 0) / 1e9)
        data[_LOAD_S].append(max(ended_ns - posted_ns, 0) / 1e9)
        data[_NOTICE_S].append(max(noticed_ns - ended_ns, 0) / 1e9)
        data[_NBYTES].append(nbytes)
        data[_PAGES].append(num_pages)
        used = sorted(rails)
        data[_RAILS] = _sum(data[_RAILS], dict.fromkeys(used, 1))
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                "kvxfer: request %s: loaded %d bytes in %d pages from %d ranks over %s in %.1f ms, after "
                "%.1f ms of connecting; noticed %.1f ms later",
                request_id,
                nbytes,
                num_pages,
                num_ranks,
                "+".join(used) or "nothing",
                data[_LOAD_S][-1] * 1e3,
                data[_CONNECT_S][-1] * 1e3,
                data[_NOTICE_S][-1] * 1e3,
            )

    def failed(self, code: str) -> None:
        """Counts a fetch that ended without its bytes; `code` is one word, as `KvxferError.code`."""
        self._current.data[_FAILURES] = _sum(self._current.data[_FAILURES], {code: 1})

    def received(self) -> None:
        """Counts a reader that has all of a request."""
        self._current.data[_RECEIPTS] += 1

    def expired(self) -> None:
        """Counts a request that was kept in vain: not all of its readers came in time."""
        self._current.data[_EXPIRED] += 1

    def take(self, num_kept: int) -> TransferStatistics | None:
        """Returns what was counted since the last call; None when nothing has happened.

        Parameters
        ----------
        num_kept
            Requests that this worker keeps for readers now.
        """
        if num_kept != self._kept_told:
            self._current.data[_KEPT] = self._kept_told = num_kept
        if self._current.is_empty():
            return None
        taken, self._current = self._current, TransferStatistics()
        return taken


class Metrics(KVConnectorPromMetrics):
    """The same for Prometheus, as ``vllm:kvxfer_...``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        histogram, counter, gauge = metric_types[Histogram], metric_types[Counter], metric_types[Gauge]

        def per_engine(metric: Any) -> dict[int, Any]:
            return dict(create_metric_per_engine(metric, per_engine_labelvalues))

        self._series = {
            name: per_engine(
                histogram(
                    name=f"vllm:kvxfer_{metric}", documentation=words, buckets=buckets, labelnames=labelnames
                )
            )
            for name, metric, buckets, words in (
                (
                    *(_CONNECT_S, "connect_seconds", _SECONDS_BUCKETS),
                    "Time from the order of a fetch until it was posted to all prefill ranks.",
                ),
                (
                    *(_LOAD_S, "load_seconds", _SECONDS_BUCKETS),
                    "Time from the posting of a fetch until its last byte was in place.",
                ),
                (
                    *(_NOTICE_S, "notice_seconds", _SECONDS_BUCKETS),
                    "Time from the last byte of a fetch until a step of the engine saw it.",
                ),
                (*(_NBYTES, "load_bytes", _NBYTES_BUCKETS), "Bytes that a worker read for a request."),
            )
        }
        self._pages = per_engine(
            counter(name="vllm:kvxfer_loaded_pages", documentation="Pages read.", labelnames=labelnames)
        )
        self._receipts = per_engine(
            counter(
                name="vllm:kvxfer_receipts",
                documentation="Readers that have all of a request; counted at prefill.",
                labelnames=labelnames,
            )
        )
        self._expired = per_engine(
            counter(
                name="vllm:kvxfer_expired_requests",
                documentation="Requests whose blocks were given back before all readers came; at prefill.",
                labelnames=labelnames,
            )
        )
        self._kept = per_engine(
            gauge(
                name="vllm:kvxfer_kept_requests",
                documentation="Requests whose blocks a worker keeps for readers; at prefill.",
                multiprocess_mode="mostrecent",
                labelnames=labelnames,
            )
        )
        # With a label of their own, of which the values come as they happen.
        self._by_rail = counter(
            name="vllm:kvxfer_loads",
            documentation="Fetches that were loaded, by each rail that moved bytes of them.",
            labelnames=[*labelnames, "rail"],
        )
        self._by_code = counter(
            name="vllm:kvxfer_failed_loads",
            documentation="Fetches that ended without their bytes, by the code of what went wrong.",
            labelnames=[*labelnames, "code"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds what one interval counted."""
        data = transfer_stats_data
        for name, metric in self._series.items():
            for value in data[name]:
                metric[engine_idx].observe(value)
        self._pages[engine_idx].inc(sum(data[_PAGES]))
        self._receipts[engine_idx].inc(data[_RECEIPTS])
        self._expired[engine_idx].inc(data[_EXPIRED])
        if data[_KEPT] is not None:
            self._kept[engine_idx].set(data[_KEPT])
        values = self.per_engine_labelvalues[engine_idx]
        for rail, count in data[_RAILS].items():
            self._by_rail.labels(*values, rail).inc(count)
        for code, count in data[_FAILURES].items():
            self._by_code.labels(*values, code).inc(count)


def _sum(ours: dict[str, int], theirs: dict[str, int]) -> dict[str, int]:
    return {name: ours.get(name, 0) + theirs.get(name, 0) for name in ours.keys() | theirs.keys()}


def _quantile(values: list[float], share: float) -> float:
    """Returns the smallest value that so large a share of all does not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]
