"""Spans: those of transfers at a collector, and those of engines and routers at the daemon."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvxfer import AgentOptions
from kvxfer.cli import main
from kvxfer.errors import KvxferError
from kvxfer.testing import Pair, connected_pair
from tests.control.serving import BOUND_S, program
from tests.waiting import until

pytest.importorskip("opentelemetry.sdk", reason="no OpenTelemetry: `make test-deploy` installs it")

SLACK_S = 0.5
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """Accepts OTLP over HTTP, and keeps spans; or answers as configured."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.spans: list[tuple[dict[str, Any], Any]] = []
        self.status = 200
        self.asked = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.asked += 1
                if outer.status == 0:  # it accepts them and never answers
                    outer.released.wait(BOUND_S)
                elif outer.status == 200:
                    request = ExportTraceServiceRequest.FromString(body)
                    for of_resource in request.resource_spans:
                        told = {each.key: each.value.string_value for each in of_resource.resource.attributes}
                        for scope in of_resource.scope_spans:
                            outer.spans += [(told, span) for span in scope.spans]
                self.send_response(outer.status or 503)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def read(pair: Pair, context: str, *, timeout_s: float = BOUND_S) -> None:
    cache = pair.decode
    cache.agent.read(cache.region, cache.remote, [0, 1], [2, 3], context=context, timeout_s=timeout_s).wait()


@pytest.fixture
def pair(tmp_path: Path, collector: Collector) -> Iterator[Pair]:
    with program(tmp_path, "--otlp", collector.url) as daemon:
        options = AgentOptions(listen="tcp://127.0.0.1:0", daemon=str(daemon.folder / "run"))
        with connected_pair(options) as made, daemon.client() as client:
            until(lambda: len(client.get("/v1/agents").json()["items"]) == 2, "not attached")
            (tmp_path / "said").write_text("\n".join(daemon.said))
            yield made
        # Whatever the collector does, the daemon stops in time.
        begun = time.monotonic()
        assert daemon.end() == 0
        assert time.monotonic() - begun < BOUND_S


def test_both_ends_are_spans_of_the_request(pair: Pair, collector: Collector) -> None:
    pair.prefill.region.grant(pair.prefill.peer, ttl_s=BOUND_S)
    read(pair, f"cmpl-7 00-{TRACE}-{SPAN}-01")
    until(lambda: len(of_ends(collector)) == 2, "no spans")
    ends = of_ends(collector)
    assert {span.name for _, span in ends} == {"kvxfer source", "kvxfer destination"}
    for resource, span in ends:
        assert resource["service.name"] == "kvxfer"
        assert resource["host.name"] == "node-a"
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, SPAN)
        told = {each.key: each.value.string_value for each in span.attributes}
        assert told["kvxfer.context"].startswith("cmpl-7 ")
        assert {told["kvxfer.agent"], told["kvxfer.peer"]} == {"prefill", "decode"}
        assert told["kvxfer.outcome"] == "done"
        # This host's clock, since 1970.
        assert abs(span.end_time_unix_nano / 1e9 - time.time()) < BOUND_S
        stages = [each for _, each in collector.spans if each.parent_span_id == span.span_id]
        # A source whose pages are read does not learn of pieces before the end.
        reached = "moving" if told["kvxfer.role"] == "destination" else "right"
        assert reached in {each.name for each in stages}
        for stage in stages:
            assert span.start_time_unix_nano <= stage.start_time_unix_nano <= stage.end_time_unix_nano
            assert stage.end_time_unix_nano <= span.end_time_unix_nano


def of_ends(collector: Collector) -> list[Any]:
    return [(told, span) for told, span in collector.spans if span.name.startswith("kvxfer ")]


def test_what_fails_says_why_and_what_is_not_sampled_is_not_told(pair: Pair, collector: Collector) -> None:
    with pytest.raises(KvxferError):  # it was not granted
        read(pair, f"cmpl-3 00-{TRACE}-{SPAN}-01", timeout_s=0.3)
    pair.prefill.region.grant(pair.prefill.peer, ttl_s=BOUND_S)
    for context in ("cmpl-1", f"cmpl-2 00-{TRACE}-{SPAN}-00"):
        read(pair, context)
    (_, span) = until(lambda: of_ends(collector), "no span")[0]
    assert span.status.code == 2
    told = {each.key: each.value.string_value for each in span.attributes}
    assert told["error.type"]
    assert {
        each.value.string_value.split()[0]
        for _, one in of_ends(collector)
        for each in one.attributes
        if each.key == "kvxfer.context"
    } == {"cmpl-3"}


@pytest.mark.parametrize("status", [503, 0], ids=["refuses", "never answers"])
def test_a_collector_that_fails_costs_nobody_anything(pair: Pair, collector: Collector, status: int) -> None:
    collector.status = status
    pair.prefill.region.grant(pair.prefill.peer, ttl_s=BOUND_S)
    for number in range(20):
        read(pair, f"cmpl-{number} 00-{TRACE}-{SPAN}-01")
    until(lambda: collector.asked, "nothing was sent")
    read(pair, f"cmpl-after 00-{TRACE}-{SPAN}-01")


def test_no_address_is_refused_in_words(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvxfer", "serve", "--state", str(tmp_path / "s"), "--no-agent"]
    command += ["--runtime", str(tmp_path / "r"), "--otlp", "collector:4318"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BOUND_S)
    assert done.returncode == 2
    assert "--otlp" in done.stderr


def test_a_request_s_way_has_spans_of_engines_and_router(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Spans sent by OpenTelemetry's own exporter, also compressed; shown by the command, and as a file."""
    from opentelemetry.exporter.otlp.proto.http import Compression

    pair.prefill.region.grant(pair.prefill.peer, ttl_s=BOUND_S)
    (url,) = re.findall(r"http://[^,]+", (tmp_path / "said").read_text())
    token = (tmp_path / "state/admin.token").read_text().strip()
    begun_s = time.time()
    with (
        tracer(url, token, "router", Compression.NoCompression) as router,
        tracer(url, token, "vllm.llm_engine", Compression.Gzip) as engine,
        router.start_as_current_span("POST /v1/completions") as root,
    ):
        told = root.get_span_context()
        with engine.start_as_current_span("llm_request") as span:
            span.set_attribute("gen_ai.request.id", "cmpl-5-0")
            read(pair, f"cmpl-5-0 00-{told.trace_id:032x}-{told.span_id:016x}-01")
    daemon = f"unix:{tmp_path}/run/api.sock"
    for request in ("cmpl-5-0", "cmpl-5", f"{told.trace_id:032x}"):
        rows = rows_of(daemon, request, capsys)
        names = [("router", "POST /v1/completions"), ("vllm.llm_engine", "llm_request")]
        names += [("decode", "takes pages from prefill"), ("prefill", "sends pages to decode")]
        at = [rows[name]["started_at_s"] for name in names]
        # An agent's clock is compared with the time of day once; the time may be set meanwhile.
        assert begun_s - SLACK_S <= at[0] <= at[1] <= at[2] + SLACK_S
        assert rows[names[1]]["details"]["gen_ai.request.id"] == "cmpl-5-0"
    out = tmp_path / "trace.json"
    assert main(["trace", "cmpl-5-0", "--daemon", daemon, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert all(words in shown for name in names for words in name), shown
    assert {each["name"] for each in json.loads(out.read_text())["traceEvents"]} >= {
        name for _, name in names
    }


def rows_of(daemon: str, request: str, capsys: pytest.CaptureFixture[str]) -> dict[tuple[str, str], Any]:
    """Waits until both ends and both spans are reported, and returns the rows by process and name."""

    def asked() -> list[Any]:
        main(["trace", request, "--daemon", daemon, "--json"])
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return rows if sum(row["depth"] == 0 for row in rows) == 4 else []

    return {(row["process"].split()[0], row["name"]): row for row in until(asked, "not told of")}


@contextmanager
def tracer(url: str, token: str, service: str, compression: Any) -> Iterator[Any]:
    """Returns a program's tracer; at the end of the block its spans have reached the daemon."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    headers = {"Authorization": f"Bearer {token}"}
    exporter = OTLPSpanExporter(f"{url}/v1/traces", headers=headers, compression=compression)
    provider = TracerProvider(resource=Resource({"service.name": service}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider.get_tracer("test")
    provider.shutdown()


def test_spans_that_are_not_taken_are_counted() -> None:
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp_messages

    from kvxfer.control.traces import otlp

    told = otlp_messages.ExportTraceServiceRequest()
    spans = told.resource_spans.add().scope_spans.add().spans
    now_s = time.time()
    for number in range(3000):
        near = number % 3 != 0
        spans.add(
            trace_id=bytes([1] * 16),
            span_id=number.to_bytes(8, "big"),
            start_time_unix_nano=int(now_s * near * 1e9),
        )
    read = otlp.read_spans(told.SerializeToString(), "", now_s)
    assert len(read.spans) == 2000 - 667
    assert len(read.spans) + read.num_rejected == 3000
    answer = otlp_messages.ExportTraceServiceResponse.FromString(otlp.answer(read.num_rejected))
    assert answer.partial_success.rejected_spans == read.num_rejected
    assert otlp.answer(0) == b""


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Content-Type": "application/json"}, b"{}", 415),
        ({"Content-Encoding": "br"}, b"", 415),
        ({}, b"\xff\xff", 422),
        ({"Content-Encoding": "gzip"}, b"no gzip", 422),
        ({"Content-Encoding": "gzip"}, gzip.compress(bytes(64 << 20)), 413),
        ({"Content-Encoding": "gzip"}, gzip.compress(b"") * 2, 422),
        ({"Content-Encoding": "gzip"}, gzip.compress(b"")[:-1], 422),
        ({}, b"\n\0" * (300 << 10), 200),
        ({}, b"\n\0" * (600 << 10), 413),
    ],
    ids=["json", "brotli", "no protobuf", "no gzip", "a bomb", "two", "cut", "empty ones", "too many"],
)
def test_what_is_no_span_is_refused(
    tmp_path: Path, headers: dict[str, str], body: bytes, status: int
) -> None:
    with program(tmp_path) as daemon, daemon.client() as client:
        told = {"Content-Type": "application/x-protobuf", **headers}
        assert client.post("/v1/traces", content=body, headers=told).status_code == status


def test_buckets_have_an_example_with_its_trace(pair: Pair, tmp_path: Path) -> None:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    pair.prefill.region.grant(pair.prefill.peer, ttl_s=BOUND_S)
    read(pair, f"cmpl-7 00-{TRACE}-{SPAN}-01")

    def examples() -> list[Any]:
        text = client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}).text
        return [
            sample.exemplar
            for family in text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
            for sample in family.samples
            if sample.exemplar
        ]

    with httpx.Client(
        transport=httpx.HTTPTransport(uds=str(tmp_path / "run/api.sock")), base_url="http://node"
    ) as client:
        found = until(examples, "no exemplars")
        assert {each.labels["trace_id"] for each in found} == {TRACE}
        transfer = client.get("/v1/transfers").json()["items"][0]["id"]
        assert {each.labels["transfer"] for each in found} == {transfer}
        assert "trace_id" not in client.get("/metrics").text
