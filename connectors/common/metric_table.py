"""A table of the metrics of handovers; each connector makes its engine's metrics from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from kvxfer.connectors.common import statistics

# From one hop between processes to the default deadline of a fetch.
_SECONDS_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# From a page to the prompt of a long context: 4 KiB to 64 GiB.
_NBYTES_BUCKETS: Final = tuple(float(4**exponent) for exponent in range(6, 19))
# How a fetch comes: "pull", "push", "return".
_MODE: Final = ("mode",)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes
    ----------
    name
        Without the engine's prefix.
    key
        The metric's key in `Counts.data`.
    kind
        Prometheus's kind; a gauge is updated when it changes.
    buckets
        The buckets of a histogram.
    labels
        The metric's labels beside the engine's: one for each level of nested dictionaries under the key.
        Their values appear as they occur.
    """

    name: str
    key: str
    kind: Literal["histogram", "counter", "gauge"]
    documentation: str
    buckets: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()

    def observe(self, data: dict[str, Any], labelled: Callable[..., Any]) -> None:
        """Adds the counts of one interval.

        Parameters
        ----------
        data
            `Counts.data`.
        labelled
            Returns the engine's metric for given values of `labels`.
        """
        for values, found in _leaves(data[self.key], len(self.labels)):
            if self.kind == "histogram":
                for value in found:
                    labelled(*values).observe(value)
            elif self.kind == "counter":
                labelled(*values).inc(sum(found) if isinstance(found, list) else found)
            elif found is not None:
                labelled(*values).set(found)


def _leaves(found: Any, depth: int) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the values at a depth of nested dictionaries, each with the names on the path to it."""
    if not depth:
        yield (), found
        return
    for name, each in found.items():
        for names, leaf in _leaves(each, depth - 1):
            yield (name, *names), leaf


METRICS: Final = (
    Metric(
        *("connect_seconds", statistics.CONNECT_S, "histogram"),
        "Time from the order of a fetch until it was posted to, or registered with, all prefill ranks.",
        _SECONDS_BUCKETS,
        _MODE,
    ),
    Metric(
        *("load_seconds", statistics.LOAD_S, "histogram"),
        "Time from the posting of a fetch until its last byte arrived; a push includes prefill's forward.",
        _SECONDS_BUCKETS,
        _MODE,
    ),
    Metric(
        *("notice_seconds", statistics.NOTICE_S, "histogram"),
        "Time from the last byte of a fetch until a step of the engine saw it.",
        _SECONDS_BUCKETS,
        _MODE,
    ),
    Metric(
        *("load_bytes", statistics.NBYTES, "histogram"),
        "Bytes that a worker fetched for a request.",
        _NBYTES_BUCKETS,
        _MODE,
    ),
    Metric("loaded_pages", statistics.PAGES, "counter", "Pages fetched.", labels=_MODE),
    Metric(
        *("receipts", statistics.RECEIPTS, "counter"),
        "Readers that have received a whole request; counted at prefill.",
    ),
    Metric(
        *("expired_requests", statistics.EXPIRED, "counter"),
        "Requests whose blocks were given back before all readers had finished; counted at prefill.",
    ),
    Metric(
        *("gave_way_requests", statistics.GAVE_WAY, "counter"),
        "Requests whose blocks were given back unread because other requests needed them; counted at "
        "prefill.",
    ),
    Metric(
        *("kept_requests", statistics.KEPT, "gauge"),
        "Requests whose blocks this engine keeps for readers, until its last worker has given them back.",
    ),
    Metric(
        *("untransferred_requests", statistics.UNTRANSFERRED, "counter"),
        "Requests that named no cache to fetch; counted at decode, which computes or refuses them.",
    ),
    Metric(
        *("loads", statistics.RAILS, "counter"),
        "Loaded fetches, by rail; a fetch counts once for each rail that moved bytes of it.",
        labels=(*_MODE, "rail"),
    ),
    Metric(
        *("failed_loads", statistics.FAILURES, "counter"),
        "Fetches that ended without their bytes, by the code of the failure.",
        labels=(*_MODE, "code"),
    ),
)
