"""The workers' counts on their way through processes into the engine's log line and metrics."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvxfer.connectors.common.statistics import PULL, PUSH, RETURN, Recorder
from kvxfer.connectors.vllm import KvxferConnector
from kvxfer.connectors.vllm.metrics import Metrics, TransferStatistics
from tests.unit.connectors.test_statistics import loaded


def taken(recorder: Recorder) -> TransferStatistics:
    counts = recorder.take()
    assert counts is not None
    return TransferStatistics(counts.data)


def test_it_goes_from_process_to_process() -> None:
    recorder = Recorder()
    loaded(recorder, load_ms=10)
    recorder.failed(PUSH, "peer-lost")
    recorder.keeps(1)
    sent = taken(recorder).to_dict()
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
    recorder.failed(RETURN, "unreachable")
    engine.observe(taken(recorder).to_dict())
    said: list[str] = []
    engine.log(log_fn=lambda text, *values: said.append(text % values))
    assert said == [
        "KV Transfer metrics: pull loads=3, pull load ms (median)=20.0, pull load ms (p90)=30.0, "
        "pull connect ms (p90)=2.0, pull notice ms (p90)=3.0, pull MB=6.0, pull MB/s of a load=100.0, "
        "pull loads over tcp=3, return failed, unreachable=1"
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
    loaded(recorder, load_ms=900, nbytes=7000, rails=("shm",), mode=PUSH)
    recorder.failed(PULL, "lease-ended")
    recorder.received()
    recorder.expired()
    recorder.untransferred()
    recorder.keeps(7)
    metrics.observe(taken(recorder).to_dict(), 1)
    assert samples("1") == {
        "load_seconds_sum, pull": pytest.approx(0.03),
        "load_seconds_sum, push": pytest.approx(0.9),
        "load_seconds_count, pull": 2,
        "load_seconds_count, push": 1,
        "connect_seconds_count, pull": 2,
        "connect_seconds_count, push": 1,
        "notice_seconds_count, pull": 2,
        "notice_seconds_count, push": 1,
        "load_bytes_sum, pull": 11000,
        "load_bytes_sum, push": 7000,
        "loaded_pages_total, pull": 8,
        "loaded_pages_total, push": 4,
        "loads_total, pull, tcp": 1,
        "loads_total, pull, shm": 1,
        "loads_total, push, shm": 1,
        "failed_loads_total, pull, lease-ended": 1,
        "receipts_total": 1,
        "expired_requests_total": 1,
        "gave_way_requests_total": 0,
        "untransferred_requests_total": 1,
        "kept_requests": 7,
    }
    # Metrics without their own labels are shown from the start.
    requests = ("expired_requests_total", "gave_way_requests_total", "untransferred_requests_total")
    assert samples("0") == dict.fromkeys(("receipts_total", *requests, "kept_requests"), 0)


def samples(engine: str) -> dict[str, float]:
    """Returns our metrics of one engine, by name and labels; only some of each histogram."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(REGISTRY).decode()):
        for sample in family.samples:
            name = sample.name.removeprefix("vllm:kvxfer_")
            is_shown = name != sample.name and not name.endswith(("_bucket", "_created"))
            if is_shown and sample.labels["engine"] == engine:
                own = (sample.labels.get(label) for label in ("mode", "rail", "code"))
                found[", ".join([name, *filter(None, own)])] = sample.value
    for name in ("connect_seconds_sum", "notice_seconds_sum", "load_bytes_count"):
        for mode in (PULL, PUSH):
            found.pop(f"{name}, {mode}", None)
    return found
