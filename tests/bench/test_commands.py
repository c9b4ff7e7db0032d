"""Small runs of the commands as a user starts them: real processes, every byte checked."""

import json
import subprocess
import sys
from typing import Any

import pytest

import kvxfer
from kvxfer.bench.report import results

pytest.importorskip("typer")

SPREAD = {"min", "median", "max"}
PERCENTILES = {"p50", "p90", "p99"}
STAGES = {"post", "first_layer", "last_layer", "notification", "decode_may_start"}

PAGES = ["pages", "--total-mib", "4", "--iterations", "2"]
HANDOVER = ["handover", "--requests", "4", "--max-tokens", "64", "--prefill-ms-per-layer", "0.2"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    # -P: the installed package, whatever the working folder holds.
    return subprocess.run(
        [sys.executable, "-P", "-m", "kvxfer.bench", *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def result_of(*arguments: str) -> dict[str, Any]:
    """Runs it with ``--format json`` and returns its one line."""
    done = bench(*arguments, "--format", "json")
    assert done.returncode == 0, done.stderr + done.stdout
    (line,) = done.stdout.splitlines()
    result: dict[str, Any] = json.loads(line)
    assert result["verified"] is True
    return result


def check_number(value: Any) -> None:
    assert isinstance(value, int | float)
    assert not isinstance(value, bool)


def check_limit(limit: dict[str, Any]) -> None:
    assert set(limit) == {"name", "gb_per_s"}
    assert limit["gb_per_s"] > 0


@pytest.mark.parametrize("op", ["write", "read"])
@pytest.mark.parametrize("memory", ["pool", "foreign"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_pages_arrive_and_are_reported(transport: str, memory: str, op: str) -> None:
    result = result_of(*PAGES, "--transport", transport, "--memory", memory, "--op", op)
    assert result["bench"] == "pages"
    assert (result["transport"], result["memory"], result["op"]) == (transport, memory, op)
    assert (result["total_mib"], result["block_kib"], result["pattern"]) == (4, 32, "random")
    assert result["iterations"] == 2
    assert set(result["total_ms"]) == set(result["gb_per_s"]) == SPREAD
    check_limit(result["limit"])
    for name in ("post_ms", "limit_ratio", "cpu_s_per_gib"):
        check_number(result[name])
    assert isinstance(result["copy_kernel"], str)
    assert result["rails"] == [transport]


@pytest.mark.parametrize("pattern", ["random", "runs", "contiguous"])
def test_pages_arrive_in_every_pattern_and_over_layers(pattern: str) -> None:
    result = result_of(*PAGES, "--pattern", pattern, "--layers", "3", "--block-kib", "4")
    assert result["num_pages"] == 3 * (4 * 1024 // 12)


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_handover_is_reported_in_its_stages(transport: str, mode: str) -> None:
    # A prefill so long that a push is posted within it on a busy machine, too.
    prefill = ["--prefill-ms-per-layer", "5"]
    result = result_of(*HANDOVER, *prefill, "--transport", transport, "--mode", mode)
    assert result["bench"] == "handover"
    assert result["requests"] == 4
    assert set(result["stages_ms"]) == STAGES
    assert all(set(stage) == PERCENTILES for stage in result["stages_ms"].values())
    assert set(result["gb_per_s"]) == PERCENTILES
    check_limit(result["limit"])
    for name in ("limit_ratio", "hidden_share", "cpu_s_per_gib"):
        check_number(result[name])
    assert set(result["rss_mib"]) == {"prefill", "decode"}
    posted = result["stages_ms"]["post"]["p50"]
    assert posted < 0 if mode == "push" else posted > 0


@pytest.mark.parametrize("model", ["Qwen3-30B-A3B", "DeepSeek-V3"])
def test_handover_of_other_shapes_with_requests_in_parallel(model: str) -> None:
    result = result_of(*HANDOVER, "--model", model, "--trace", "azure", "--concurrency", "3")
    assert result["model"] == model
    assert result["model_source"].startswith("https://")


@pytest.mark.parametrize("command", [PAGES, HANDOVER])
@pytest.mark.parametrize("output", ["json", "table"])
def test_corrupted_byte_ends_with_status_1(command: list[str], output: str) -> None:
    done = bench(*command, "--corrupt", "--format", output)
    assert done.returncode == 1, done.stderr
    if output == "json":
        result = json.loads(done.stdout)
        assert result["verified"] is False
        assert "expected 0x" in result["failure"]
    else:
        assert "check failed" in done.stdout


@pytest.mark.parametrize("command", [PAGES, HANDOVER])
def test_table_goes_to_stdout_and_progress_to_stderr(command: list[str]) -> None:
    done = bench(*command)
    assert done.returncode == 0, done.stderr
    assert "every byte checked" in done.stdout
    assert "setting up two agents" in done.stderr


@pytest.mark.parametrize("command", [PAGES, HANDOVER])
def test_out_keeps_the_result_with_machine_and_noise(command: list[str], tmp_path: Any) -> None:
    printed = result_of(*command, "--out", str(tmp_path))
    failed = bench(*command, "--corrupt", "--out", str(tmp_path))
    assert failed.returncode == 1
    found = results.read(tmp_path)
    assert found.records[0].result == printed
    assert found.records[1].result["verified"] is False
    assert found.records[0].machine["kvxfer"] == kvxfer.__version__
    noise = found.records[0].noise
    assert noise is not None
    assert set(noise) == {"wall_s", "own_share", "other_share", "steal_share"}


def test_out_that_is_a_file_is_refused_before_the_run(tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")
    done = bench(*PAGES, "--out", str(tmp_path / "file"))
    assert done.returncode == 2
    assert "is a file; name a directory" in done.stderr
    assert "setting up two agents" not in done.stderr


def test_unknown_trace_field_is_named(tmp_path: Any) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [], "user": 3}\n')
    done = bench(*HANDOVER, "--trace", str(trace))
    assert done.returncode == 2
    assert "trace.jsonl:1: fields do not fit: unknown 'user'" in done.stderr


LAYOUTS = [("tp4", "tp2"), ("nhd", "hnd"), ("bf16", "fp8"), ("p16", "p64")]


@pytest.mark.parametrize(("src", "dst"), LAYOUTS)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_pages_between_layouts_that_differ_are_reported(transport: str, src: str, dst: str) -> None:
    layouts = ["--src-layout", src, "--dst-layout", dst]
    result = result_of(*PAGES, *layouts, "--transport", transport)
    assert (result["bench"], result["src_layout"], result["dst_layout"]) == ("pages", src, dst)
    assert 0 < result["src_nbytes"] <= 4 << 20
    assert result["dst_nbytes"] == result["src_nbytes"] // (2 if dst == "fp8" else 1)
    assert set(result["total_ms"]) == set(result["gb_per_s"]) == SPREAD
    for name in ("post_ms", "plain_gb_s", "ratio_to_plain", "cpu_s_per_gib"):
        check_number(result[name])
    for name in ("layers", "num_tokens", "num_sources", "runs_per_pair", "smallest_run_nbytes"):
        assert isinstance(result[name], int)
        assert result[name] > 0
    assert f"in {result['runs_per_pair']} runs" in result["explain"]
    assert result["rails"] == [transport]
    assert ("ratio_to_piecewise" in result) == (transport == "tcp")
    if transport == "tcp":
        for name in ("piecewise_gb_s", "ratio_to_piecewise"):
            check_number(result[name])
        assert 0 < result["piecewise_nbytes"] <= result["src_nbytes"]
        assert result["piecewise_pieces"] > 0


@pytest.mark.parametrize("memory", ["pool", "foreign"])
def test_pages_between_layouts_can_be_read(memory: str) -> None:
    layouts = ["--src-layout", "tp4+fp8+per-page-head", "--dst-layout", "tp2+hnd", "--shape", "Llama-3.1-8B"]
    result = result_of(*PAGES, *layouts, "--op", "read", "--memory", memory)
    assert (result["op"], result["memory"], result["shape"]) == ("read", memory, "Llama-3.1-8B")


@pytest.mark.parametrize("op", ["write", "read"])
def test_corrupted_element_between_layouts_ends_with_status_1(op: str) -> None:
    done = bench(*PAGES, "--src-layout", "nhd", "--dst-layout", "hnd", "--op", op, "--corrupt")
    assert done.returncode == 1, done.stderr
    assert "check failed" in done.stdout
    assert "token 0, head 0, dim 0 is 0x" in done.stdout


def test_table_of_layouts_that_differ_explains_the_program() -> None:
    done = bench(*PAGES, "--src-layout", "tp4", "--dst-layout", "tp2", "--layers", "2")
    assert done.returncode == 0, done.stderr
    for words in (
        "in 2 layers of Llama-3.1-70B",
        "plain copy: ",
        "in 32 runs",
        "then a layer of each transfer",
    ):
        assert words in done.stdout


def test_unknown_and_missing_layouts_are_refused_in_words() -> None:
    unknown = bench("pages", "--src-layout", "tp4+nhdx", "--dst-layout", "tp2")
    assert unknown.returncode == 2
    assert "unknown name 'nhdx' in the layout 'tp4+nhdx'; known are tp1 tp2 tp4 tp8" in unknown.stderr
    missing = bench("plan", "--dst-layout", "tp2")
    assert missing.returncode == 2
    assert "--src-layout is missing" in missing.stderr
    never = bench("pages", "--src-layout", "tp2", "--dst-layout", "fp8+per-page")
    assert never.returncode == 2
    assert "layout-mismatch" in never.stderr


@pytest.mark.parametrize(("src", "dst"), [("tp8", "tp4"), ("tp2+p48", "hnd+p32"), ("fp8", "pp2+apart")])
def test_plan_between_layouts_that_differ_is_reported(src: str, dst: str) -> None:
    plan = ["plan", "--layers", "4", "--blocks", "30", "--iterations", "3"]
    result = result_of(*plan, "--src-layout", src, "--dst-layout", dst)
    assert (result["bench"], result["layers"], result["blocks"]) == ("plan", 4, 30)
    assert set(result["compile_ms"]) == set(result["post_ms"]) == set(result["post_pair_ms"]) == SPREAD
    check_number(result["install_ms"])
    check_number(result["first_post_ms"])
    assert result["num_tokens"] >= 30 * 16
    assert result["num_loops"] > 0
    done = bench(*plan, "--src-layout", src, "--dst-layout", dst)
    assert "of it, what one source rank takes" in done.stdout
