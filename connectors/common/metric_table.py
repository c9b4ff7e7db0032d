"""What an engine's monitoring shows of its handovers: a table, of which each engine makes its own metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from kvxfer.connectors.common import statistics

# From one hop between processes to the default deadline of a fetch.
_SECONDS_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# From a page to the prompt of a long context: 4 KiB to 64 GiB.
_NBYTES_BUCKETS: Final = tuple(float(4**exponent) for exponent in range(6, 19))


@dataclass(frozen=True, slots=True)
class Metric:
    """One of them.

    Attributes
    ----------
    name
        Without what an engine calls all of its own.
    key
        Of `Counts.data`.
    kind
        Of Prometheus; a gauge is told when it changes.
    buckets
        Of a histogram.
    label
        The metric's own beside the engine's, whose values come as they happen; "" for none.
    """

    name: str
    key: str
    kind: Literal["histogram", "counter", "gauge"]
    documentation: str
    buckets: tuple[float, ...] = ()
    label: str = ""

    def observe(self, data: dict[str, Any], labelled: Callable[..., Any]) -> None:
        """Adds what one interval counted.

        Parameters
        ----------
        data
            Of `Counts`.
        labelled
            Returns the engine's metric, for a value of `label` where there is one.
        """
        found = data[self.key]
        if self.label:
            for value, count in found.items():
                labelled(value).inc(count)
        elif self.kind == "histogram":
            for value in found:
                labelled().observe(value)
        elif self.kind == "counter":
            labelled().inc(sum(found) if isinstance(found, list) else found)
        elif found is not None:
            labelled().set(found)


METRICS: Final = (
    Metric(
        *("connect_seconds", statistics.CONNECT_S, "histogram"),
        "Time from the order of a fetch until it was posted to all prefill ranks.",
        _SECONDS_BUCKETS,
    ),
    Metric(
        *("load_seconds", statistics.LOAD_S, "histogram"),
        "Time from the posting of a fetch until its last byte was in place.",
        _SECONDS_BUCKETS,
    ),
    Metric(
        *("notice_seconds", statistics.NOTICE_S, "histogram"),
        "Time from the last byte of a fetch until a step of the engine saw it.",
        _SECONDS_BUCKETS,
    ),
    Metric(
        *("load_bytes", statistics.NBYTES, "histogram"),
        "Bytes that a worker read for a request.",
        _NBYTES_BUCKETS,
    ),
    Metric("loaded_pages", statistics.PAGES, "counter", "Pages read."),
    Metric(
        *("receipts", statistics.RECEIPTS, "counter"),
        "Readers that have all of a request; counted at prefill.",
    ),
    Metric(
        *("expired_requests", statistics.EXPIRED, "counter"),
        "Requests whose blocks were given back before all readers came; at prefill.",
    ),
    Metric(
        *("kept_requests", statistics.KEPT, "gauge"),
        "Requests whose blocks a worker keeps for readers; at prefill.",
    ),
    Metric(
        *("loads", statistics.RAILS, "counter"),
        "Fetches that were loaded, by each rail that moved bytes of them.",
        label="rail",
    ),
    Metric(
        *("failed_loads", statistics.FAILURES, "counter"),
        "Fetches that ended without their bytes, by the code of what went wrong.",
        label="code",
    ),
)
