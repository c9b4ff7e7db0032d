"""What workers count, from process to process, into the engine's log line and its metrics."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvxfer.connectors.common.statistics import Recorder
from kvxfer.connectors.vllm import KvxferConnector
from kvxfer.connectors.vllm.metrics import Metrics, TransferStatistics
from tests.unit.connectors.test_statistics import loaded


def taken(recorder: Recorder, num_kept: int = 0) -> TransferStatistics:
    counts = recorder.take(num_kept)
    assert counts is not None
    return TransferStatistics(counts.data)


def test_it_goes_from_process_to_process() -> None:
    recorder = Recorder()
    loaded(recorder, load_ms=10)
    recorder.failed("peer-lost")
    sent = taken(recorder, 1).to_dict()
    for arrived in (json.loads(json.dumps(sent)), MsgpackDecoder().decode(MsgpackEncoder().encode(sent))):
        rebuilt = KvxferConnector.build_kv_connector_stats(arrived)
        assert isinstance(rebuilt, TransferStatistics)
        assert rebuilt.data == sent
    assert KvxferConnector.build_kv_connector_stats() == TransferStatistics()


def test_the_engines_log_line_says_what_happened() -> None:
    engine: Any = KVConnectorLogging(None)
    engine.connector_cls = KvxferConnector
    recorder = Recorder()
    for load_ms in (10, 20, 30):
        loaded(recorder, load_ms=load_ms, nbytes=2_000_000)
        engine.observe(taken(recorder).to_dict())
    recorder.failed("unreachable")
    engine.observe(taken(recorder).to_dict())
    said: list[str] = []
    engine.log(log_fn=lambda text, *values: said.append(text % values))
    assert said == [
        "KV Transfer metrics: loads=3, load ms (median)=20.0, load ms (p90)=30.0, connect ms (p90)=2.0, "
        "notice ms (p90)=3.0, MB=6.0, MB/s of a load=100.0, loads over tcp=3, failed, unreachable=1"
    ]
    engine.log(log_fn=lambda text, *values: said.append(text % values))
    assert len(said) == 1, "an interval without transfers is not logged"


def test_prometheus_has_all_of_it_for_each_engine() -> None:
    config: Any = SimpleNamespace(kv_transfer_config=None)
    types = {Histogram: Histogram, Counter: Counter, Gauge: Gauge}
    labels = ["model_name", "engine"]
    metrics = KvxferConnector.build_prom_metrics(config, types, labels, {0: ["tiny", "0"], 1: ["tiny", "1"]})
    assert isinstance(metrics, Metrics)
    recorder = Recorder()
    loaded(recorder, load_ms=10, nbytes=5000)
    loaded(recorder, load_ms=20, nbytes=6000, rails=("shm",))
    recorder.failed("lease-ended")
    recorder.received()
    recorder.expired()
    metrics.observe(taken(recorder, 7).to_dict(), 1)
    found = {
        (sample.name, sample.labels.get("rail") or sample.labels.get("code") or ""): sample.value
        for family in text_string_to_metric_families(generate_latest(REGISTRY).decode())
        for sample in family.samples
        if sample.name.startswith("vllm:kvxfer") and sample.labels["engine"] == "1"
    }
    assert found["vllm:kvxfer_load_seconds_sum", ""] == pytest.approx(0.03)
    assert found["vllm:kvxfer_connect_seconds_count", ""] == 2
    assert found["vllm:kvxfer_notice_seconds_count", ""] == 2
    assert found["vllm:kvxfer_load_bytes_sum", ""] == 11000
    assert found["vllm:kvxfer_loaded_pages_total", ""] == 8
    assert found["vllm:kvxfer_loads_total", "tcp"] == 1
    assert found["vllm:kvxfer_loads_total", "shm"] == 1
    assert found["vllm:kvxfer_failed_loads_total", "lease-ended"] == 1
    assert found["vllm:kvxfer_receipts_total", ""] == 1
    assert found["vllm:kvxfer_expired_requests_total", ""] == 1
    assert found["vllm:kvxfer_kept_requests", ""] == 7
