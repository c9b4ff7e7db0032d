"""Spans of transfers: what a collector gets of real ones, and that one which fails costs nobody anything."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvxfer import AgentOptions
from kvxfer.errors import KvxferError
from kvxfer.testing import Pair, connected_pair
from tests.control.serving import BOUND_S, program
from tests.control.waiting import until

pytest.importorskip("opentelemetry.sdk", reason="no OpenTelemetry: `make test-deploy` installs it")

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """Takes OTLP by HTTP, and keeps spans; or answers as it is told."""

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
                if outer.status == 0:  # it takes them and never answers
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
            yield made
        # Whatever the collector does.
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
        # The clock of this host, since 1970.
        assert abs(span.end_time_unix_nano / 1e9 - time.time()) < BOUND_S
        stages = [each for _, each in collector.spans if each.parent_span_id == span.span_id]
        # A source whose pages are fetched hears of no piece before the end.
        reached = "moving" if told["kvxfer.role"] == "destination" else "right"
        assert reached in {each.name for each in stages}
        for stage in stages:
            assert span.start_time_unix_nano <= stage.start_time_unix_nano <= stage.end_time_unix_nano
            assert stage.end_time_unix_nano <= span.end_time_unix_nano


def of_ends(collector: Collector) -> list[Any]:
    return [(told, span) for told, span in collector.spans if span.name.startswith("kvxfer ")]


def test_what_fails_says_why_and_what_is_not_sampled_is_not_told(pair: Pair, collector: Collector) -> None:
    with pytest.raises(KvxferError):  # nobody has granted it
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
    command = [
        sys.executable,
        "-m",
        "kvxfer.control",
        "--state",
        str(tmp_path / "s"),
        "--otlp",
        "collector:4318",
    ]
    command += ["--runtime", str(tmp_path / "r"), "--no-agent"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BOUND_S)
    assert done.returncode == 2
    assert "--otlp" in done.stderr
