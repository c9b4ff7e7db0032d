"""What workers count, from process to process, into the engine's log line and its metrics."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvxfer.connectors.vllm import KvxferConnector
from kvxfer.connectors.vllm.statistics import Metrics, Recorder, TransferStatistics
from kvxfer.handle import Stages

MS = 1_000_000


def loaded(
    recorder: Recorder, *, load_ms: int, rails: tuple[str, ...] = ("tcp",), nbytes: int = 1000
) -> None:
    """A fetch that waited 2 ms for a session and was noticed 3 ms after its end."""
    recorder.loaded(
        "a",
        began_ns=0,
        noticed_ns=(2 + load_ms + 3) * MS,
        stages=Stages(2 * MS, 3 * MS, (2 + load_ms) * MS),
        rails=rails,
        nbytes=nbytes,
        num_pages=4,
        num_ranks=2,
    )


def taken(recorder: Recorder, num_kept: int = 0) -> TransferStatistics:
    statistics = recorder.take(num_kept)
    assert statistics is not None
    return statistics


def test_nothing_is_taken_where_nothing_happened() -> None:
    recorder = Recorder()
    assert recorder.take(0) is None
    assert TransferStatistics().is_empty()
    recorder.received()
    assert recorder.take(0) is not None
    assert recorder.take(0) is None


def test_a_change_of_what_is_kept_is_told_once_and_its_end_as_well() -> None:
    recorder = Recorder()
    assert taken(recorder, 2).data["kept"] == 2
    assert recorder.take(2) is None
    assert taken(recorder, 0).data["kept"] == 0


def test_a_fetch_is_told_apart_into_connecting_loading_and_noticing() -> None:
    recorder = Recorder()
    loaded(recorder, load_ms=10)
    data = taken(recorder).data
    assert (data["connect_s"], data["load_s"], data["notice_s"]) == ([0.002], [0.01], [0.003])
    assert (data["nbytes"], data["num_pages"], data["rails"]) == ([1000], [4], {"tcp": 1})


def test_a_fetch_of_nothing_took_no_time_to_load() -> None:
    recorder = Recorder()
    recorder.loaded(
        "a",
        began_ns=0,
        noticed_ns=5 * MS,
        stages=Stages(0, 0, 0),
        rails=[],
        nbytes=0,
        num_pages=0,
        num_ranks=1,
    )
    data = taken(recorder).data
    assert (data["connect_s"], data["load_s"], data["notice_s"]) == ([0.005], [0.0], [0.0])
    assert taken_line(data) == {"loads": 1}


def taken_line(data: dict[str, Any]) -> dict[str, Any]:
    """The log line's entries that are not 0 or times."""
    line = TransferStatistics(data).reduce()
    return {name: value for name, value in line.items() if value and "ms" not in name}


def test_workers_and_intervals_add_up() -> None:
    first, second = Recorder(), Recorder()
    loaded(first, load_ms=10)
    first.failed("lease-ended")
    loaded(second, load_ms=30, rails=("shm", "tcp"))
    second.failed("lease-ended")
    second.failed("peer-lost")
    second.expired()
    both = taken(first, 3).aggregate(taken(second, 4))
    assert both.data["load_s"] == [0.01, 0.03]
    assert both.data["rails"] == {"tcp": 2, "shm": 1}
    assert both.data["failures"] == {"lease-ended": 2, "peer-lost": 1}
    assert (both.data["receipts"], both.data["expired"], both.data["kept"]) == (0, 1, 4)
    # Who says nothing of what is kept does not take it back.
    loaded(first, load_ms=1)
    assert both.aggregate(taken(first, 3)).data["kept"] == 4


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


def test_each_fetch_can_be_followed_by_its_request(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    loaded(recorder, load_ms=10)
    assert not caplog.messages
    with caplog.at_level(logging.DEBUG, "kvxfer"):
        loaded(recorder, load_ms=10, rails=("shm",))
    assert caplog.messages == [
        "kvxfer: request a: loaded 1000 bytes in 4 pages from 2 ranks over shm in 10.0 ms, after 2.0 ms of "
        "connecting; noticed 3.0 ms later"
    ]


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
