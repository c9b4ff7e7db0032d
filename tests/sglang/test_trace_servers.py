"""A request's trace through SGLang: its own spans and kvxfer's transfers, joined by the room."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvxfer.bench.engines.sglang_server import generate_apart
from kvxfer.control import Client, ControlError, schema
from tests.control.serving import program
from tests.sglang.engine import random_prompt, server
from tests.waiting import until

pytest.importorskip("opentelemetry.sdk", reason="no OpenTelemetry in SGLang's environment")


@pytest.mark.slow
def test_a_room_is_followed_through_both_servers(weights: Path, tmp_path: Path) -> None:
    with program(tmp_path) as daemon, ExitStack() as stack, Client(daemon.folder / "run") as client:
        environment = {
            "KVXFER_DAEMON_DIR": str(daemon.folder / "run"),
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer {daemon.token}",
        }
        tracing = ("--enable-trace", "--otlp-traces-endpoint", f"{daemon.url}/v1/traces")
        prefill, decode = (
            stack.enter_context(
                server(role, weights, tmp_path, role, arguments=tracing, environment=environment)
            )
            for role in ("prefill", "decode")
        )
        for engine in (prefill, decode):
            engine.wait_ready()
        room = secrets.randbelow(1 << 63)
        generate_apart(prefill, decode, random_prompt(100, "traced"), bootstrap_room=room)

        def told() -> schema.RequestTrace | None:
            try:
                found = client.get_request_trace(f"room {room}")
            except ControlError:
                return None
            names = [row.name for row in found.rows]
            is_whole = "pages move" in names and {"prefill Req", "decode Req"} <= {
                name[: name.find("Req") + 3] for name in names
            }
            return found if is_whole else None

        found = until(told, "its way is not known")
        assert {row.process.split()[0] for row in found.rows if "Req" in row.name} == {"sglang"}
        # SGLang's own name of the request gives the same result.
        rid = next(row.details["rid"] for row in found.rows if "rid" in row.details)
        assert any(row.name == "pages move" for row in client.get_request_trace(rid).rows)
