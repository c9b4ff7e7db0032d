"""The counters in the form of vLLM's log and Prometheus metrics: ``vllm:kvxfer_...``."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvxfer.connectors.common.metric_table import METRICS
from kvxfer.connectors.common.statistics import Counts

_KINDS: Final[dict[str, Any]] = {"histogram": Histogram, "counter": Counter, "gauge": Gauge}


class TransferStatistics(Counts, KVConnectorStats):
    """The counts of one worker, or of all of them, in an interval, as the engine passes them on."""

    def aggregate(self, other: KVConnectorStats) -> TransferStatistics:
        self.add(other.data)
        return self


class Metrics(KVConnectorPromMetrics):
    """The counters as Prometheus metrics."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._made: list[Any] = []
        for each in METRICS:
            options: dict[str, Any] = {}
            if each.kind == "histogram":
                options["buckets"] = each.buckets
            elif each.kind == "gauge":
                options["multiprocess_mode"] = "mostrecent"
            made = metric_types[_KINDS[each.kind]](
                name=f"vllm:kvxfer_{each.name}",
                documentation=each.documentation,
                labelnames=[*labelnames, *each.labels],
                **options,
            )
            self._made.append(made)
            if not each.labels:
                # Created now, so that Prometheus shows it before the first event.
                for values in per_engine_labelvalues.values():
                    made.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds the counts of one interval."""
        values = self.per_engine_labelvalues[engine_idx]
        for each, made in zip(METRICS, self._made, strict=True):
            each.observe(transfer_stats_data, partial(made.labels, *values))
