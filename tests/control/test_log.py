"""The daemon's log: lines that programs read, and one for a lost peer."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from kvxfer import AgentOptions
from kvxfer.errors import KvxferError, PeerError
from kvxfer.log_lines import JsonLines
from kvxfer.testing import connected_pair
from tests.control.serving import BOUND_S, program
from tests.control.waiting import until


def test_a_line_is_one_object_with_what_an_error_knows() -> None:
    error = PeerError("prefill-0\nwas lost", code="peer-lost", peer="prefill-0", context="cmpl-1")
    record = logging.LogRecord("kvxfer", logging.WARNING, "x.py", 1, "a %s: %s", ("b", error), None)
    record.fields = {"transfers": 3}
    line = JsonLines().format(record)
    assert "\n" not in line
    told = json.loads(line)
    assert told.pop("time").endswith("+00:00")
    del told["pid"]
    assert told == {
        "level": "warning",
        "logger": "kvxfer",
        "message": f"a b: {error}",
        "code": "peer-lost",
        "peer": "prefill-0",
        "context": "cmpl-1",
        "transfers": 3,
    }


def test_a_lost_peer_is_one_line_and_not_one_for_each_transfer(tmp_path: Path) -> None:
    with program(tmp_path, "--log", "json") as daemon:
        options = AgentOptions(listen="tcp://127.0.0.1:0", daemon=str(daemon.folder / "run"))
        with connected_pair(options) as pair, daemon.client() as client:
            until(lambda: len(client.get("/v1/peers").json()["items"]) == 2, "not attached")
            prefill = pair.prefill
            # They wait for a right that the peer has not given yet.
            writes = [
                prefill.agent.write(prefill.region, prefill.remote, [block], [block], timeout_s=BOUND_S)
                for block in range(prefill.region.num_blocks)
            ]
            pair.decode.agent.close()
            for write in writes:
                with pytest.raises(KvxferError):
                    write.wait(BOUND_S)
            until(lambda: any('"transfers"' in line for line in daemon.said), "no line")
        assert daemon.end() == 0
    lines = [line for line in map(json.loads, daemon.said) if "transfers" in line]
    (line,) = lines
    assert (line["agent"], line["peer"], line["transfers"]) == ("prefill", "decode", len(writes))
    assert line["code"] == "peer-lost"
    assert line["level"] == "warning"
