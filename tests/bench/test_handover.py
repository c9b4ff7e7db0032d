"""``kvxfer bench handover``: other models, arrivals, prefix reuse and its page; real processes."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from kvxfer import cli
from kvxfer.bench.work import trace
from kvxfer.bench.work.models import model

pytest.importorskip("typer")

SMALL = ["bench", "handover", "--max-tokens", "256", "--prefill-ms-per-layer", "0.1", "--format", "json"]


def result_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    status = cli.main([*SMALL, *arguments])
    captured = capsys.readouterr()
    assert status == 0, captured.err + captured.out
    result: dict[str, Any] = json.loads(captured.out)
    assert result["verified"] is True
    return result


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize(
    ("name", "transport"),
    [("DeepSeek-V3", "shm"), ("Gemma-3-27B", "shm"), ("gpt-oss-120b", "tcp"), ("Qwen3-Next-80B-A3B", "tcp")],
)
def test_layers_that_do_not_see_every_token_move_what_decode_needs(
    capsys: pytest.CaptureFixture[str], name: str, transport: str, mode: str
) -> None:
    # More requests than blocks for them at once: blocks are used again, under leases that are new.
    result = result_of(capsys, "--model", name, "--transport", transport, "--mode", mode, "--requests", "6")
    requests = trace.scale(trace.read_trace(trace.find_trace("mooncake")), 6, 256)
    shape = model(name)
    assert result["total_nbytes"] == sum(shape.request_nbytes(one.input_tokens) for one in requests)
    assert result["rails"] == [transport]


def test_corrupted_state_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "Qwen3-Next-80B-A3B", "--requests", "2", "--corrupt"]
    assert cli.main([*SMALL, *arguments]) == 1
    result = json.loads(capsys.readouterr().out)
    assert re.search(r"request 1, layer 46, state: byte 1097727 of page 0", result["failure"])


@pytest.mark.parametrize("arrivals", [("poisson", "--rate", "200"), ("trace", "--speedup", "1000")])
def test_open_arrivals_are_measured_from_the_arrival(
    capsys: pytest.CaptureFixture[str], arrivals: tuple[str, ...]
) -> None:
    result = result_of(capsys, "--requests", "8", "--concurrency", "2", "--arrivals", *arrivals)
    assert "queue_ms" not in result_of(capsys, "--requests", "2")
    waited, whole = result["queue_ms"], result["arrival_to_decode_ms"]
    assert all(0 <= waited[key] < whole[key] for key in ("p50", "p90", "p99"))


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("model_name", ["Llama-3.1-8B", "Qwen3-Next-80B-A3B"])
def test_every_prefill_serves_every_decode(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model_name: str, mode: str
) -> None:
    page = tmp_path / "page.html"
    several = ("--prefills", "2", "--decodes", "3", "--concurrency", "2", "--requests", "14")
    same = ("--model", model_name, "--mode", mode, "--html", str(page))
    result = result_of(capsys, *several, *same)
    requests = trace.scale(trace.read_trace(trace.find_trace("mooncake")), 14, 256)
    shape = model(model_name)
    assert result["total_nbytes"] == sum(shape.request_nbytes(one.input_tokens) for one in requests)
    assert (result["prefills"], result["decodes"]) == (2, 3)
    assert len(re.findall(r">\d+: \d+ tokens</text>", page.read_text())) >= 14


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("concurrency", ["1", "3"])
def test_blocks_of_a_known_prefix_do_not_move(
    capsys: pytest.CaptureFixture[str], mode: str, concurrency: str
) -> None:
    same = ("--requests", "12", "--mode", mode, "--concurrency", concurrency)
    plain = result_of(capsys, *same)
    reused = result_of(capsys, *same, "--prefix-reuse")
    assert plain["reused_share"] == 0
    assert reused["reused_share"] > 0
    kept = plain["total_nbytes"] - reused["total_nbytes"]
    assert kept / plain["total_nbytes"] == pytest.approx(reused["reused_share"], abs=1e-3)


def test_reused_blocks_are_checked_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    # Equal ids and lengths: all but the last block of the second request are there.
    line = {"timestamp": 0, "input_length": 2048, "output_length": 1, "hash_ids": [4, 5, 6, 7]}
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{json.dumps(line)}\n{json.dumps(line)}\n")
    same = ("--requests", "2", "--trace", str(file), "--prefix-reuse")
    result = result_of(capsys, *same)
    assert result["reused_share"] == pytest.approx(15 / 32, abs=1e-3)
    assert result["total_nbytes"] == 17 * result["block_nbytes"]
    assert cli.main([*SMALL, *same, "--corrupt"]) == 1


@pytest.mark.parametrize("corrupt", [False, True])
def test_page_shows_every_request(capsys: pytest.CaptureFixture[str], tmp_path: Path, corrupt: bool) -> None:
    page = tmp_path / "handover.html"
    arguments = ["--requests", "5", "--html", str(page), *(["--corrupt"] if corrupt else [])]
    assert cli.main([*SMALL, *arguments]) == int(corrupt)
    text = page.read_text()
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)
    assert not re.search(r'(src|href)\s*=\s*"[^#]|@import|url\([^#]', text)
    for heading in ("timeline", "figures"):
        assert f"<h2>{heading}</h2>" in text
    assert ("check failed" in text) is corrupt
    shown = {int(request) for request in re.findall(r">(\d+): \d+ tokens</text>", text)}
    # The failed one, and those of its part of the run, are not there.
    assert shown == (set(range(5)) if not corrupt else set(range(3)))
