"""Small runs of the commands as a user starts them: real processes, every byte checked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import kvxfer
from kvxfer._native import kernel_tls
from kvxfer.bench.daemon.measure import SCENES
from kvxfer.bench.report import results
from kvxfer.bench.scale.measure import COLUMNS, SERIES
from kvxfer.bench.setup.measure import FIGURES as SETUP_FIGURES
from kvxfer.bench.store.measure import OPENED
from tests import fork_server

pytest.importorskip("typer")

SPREAD = {"min", "median", "max"}
PERCENTILES = {"p50", "p90", "p99"}
STAGES = {"post", "first_layer", "last_layer", "notification", "decode_may_start"}

PAGES = ["pages", "--total-mib", "4", "--iterations", "2"]
HANDOVER = ["handover", "--requests", "4", "--max-tokens", "64", "--prefill-ms-per-layer", "0.2"]
PARKING = ["parking", "--total-mib", "4", "--layers", "4", "--iterations", "2"]
DAEMON = ["daemon", "--seconds", "1", "--iterations", "1", "--records", "3000", "--agents", "8"]
DAEMON += ["--watchers", "8", "--events-per-s", "1000", "--transfers-per-s", "200"]
BY_DAY = ("start", "requests", "events")  # the other scenes are measured at night
PLAN = ["plan", "--layers", "4", "--blocks", "30", "--iterations", "3"]
STORE = ["store", "--page-kib", "16,32", "--total-mib", "1", "--slots", "700", "--iterations", "2"]
PROGRAM = "import runpy; runpy.run_module('kvxfer.bench', run_name='__main__', alter_sys=True)"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return fork_server.run(PROGRAM, *arguments, engine="tests.bench.forked", timeout=600)


def result_of(*arguments: str, status: int = 0) -> dict[str, Any]:
    """Runs it with ``--format json`` and returns its one line."""
    done = bench(*arguments, "--format", "json")
    assert done.returncode == status, done.stderr + done.stdout
    (line,) = done.stdout.splitlines()
    result: dict[str, Any] = json.loads(line)
    assert result["bench"] == arguments[0]
    assert result["verified"] is (status != 1)
    return result


def check_figures(result: dict[str, Any], *names: str) -> None:
    """Asserts that each is a number above 0, or a spread or percentiles of such numbers."""
    for name in names:
        value = result[name]
        assert not isinstance(value, dict) or set(value) in (SPREAD, PERCENTILES), name
        for number in value.values() if isinstance(value, dict) else (value,):
            assert isinstance(number, int | float), name
            assert number > 0, name


@pytest.mark.parametrize(
    ("transport", "memory", "op"),
    [
        ("shm", "pool", "read"),
        ("shm", "foreign", "write"),
        ("unix", "foreign", "read"),
        ("tcp", "pool", "write"),
    ],
)
def test_pages_arrive_are_reported_and_kept(transport: str, memory: str, op: str, tmp_path: Path) -> None:
    asked = {"transport": transport, "memory": memory, "op": op}
    more = (word for name, value in asked.items() for word in (f"--{name}", value))
    result = result_of(*PAGES, *more, "--out", str(tmp_path))
    assert asked | {"total_mib": 4, "block_kib": 32, "iterations": 2} == {
        name: result[name] for name in (*asked, "total_mib", "block_kib", "iterations")
    }
    check_figures(result, "total_ms", "gb_per_s", "post_ms", "limit_ratio", "cpu_s_per_gib")
    check_figures(result["limit"], "gb_per_s")
    assert result["rails"] == [transport]
    (found,) = results.read(tmp_path).records
    assert found.result == result
    assert found.machine["kvxfer"] == kvxfer.__version__
    assert set(found.noise or ()) == {"wall_s", "own_share", "other_share", "steal_share"}


def test_pages_with_certificates_are_reported_beside_those_without() -> None:
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made by the program openssl")
    result = result_of(*PAGES, "--transport", "tcp", "--tls")
    offered = ["tls"] if kernel_tls()[0] == "nothing" else ["tls", "kernel_tls"]
    for who in offered:
        check_figures(result, f"{who}_gb_s", f"{who}_ratio", f"{who}_cpu_s_per_gib")


@pytest.mark.parametrize(
    "more", [[], ["--op", "read", "--memory", "foreign"], ["--src-layout", "bf16", "--dst-layout", "fp8"]]
)
def test_pages_by_several_threads_are_reported_side_by_side(more: list[str]) -> None:
    result = result_of(*PAGES, "--copy-threads", "1,2", *more)
    rows = result["rows"]
    assert [row["copy_threads"] for row in rows] == result["copy_threads"] == [1, 2]
    assert rows[0]["ratio_to_first"] == 1
    names = ["gb_per_s", "ratio_to_first"]
    if "foreign" not in more:
        names += ["limit_gb_s", "ratio_to_limit"]
    if "--src-layout" not in more:
        names += ["page_us", "page_ratio_to_first"]
    for row in rows:
        assert set(row) == {"copy_threads", *names}
        check_figures(row, *names)


@pytest.mark.parametrize(
    ("transport", "src", "dst"),
    [("tcp", "tp4", "tp2"), ("shm", "nhd", "hnd"), ("tcp", "bf16", "fp8"), ("shm", "p16", "p64")],
)
def test_pages_between_layouts_that_differ_are_reported(transport: str, src: str, dst: str) -> None:
    result = result_of(*PAGES, "--src-layout", src, "--dst-layout", dst, "--transport", transport)
    assert (result["src_layout"], result["dst_layout"], result["rails"]) == (src, dst, [transport])
    assert 0 < result["src_nbytes"] <= 4 << 20
    assert result["dst_nbytes"] == result["src_nbytes"] // (2 if dst == "fp8" else 1)
    check_figures(result, "total_ms", "gb_per_s", "post_ms", "plain_gb_s", "ratio_to_plain", "limit_ratio")
    check_figures(result, "layers", "num_tokens", "num_sources", "runs_per_pair", "smallest_run_nbytes")
    assert f"in {result['runs_per_pair']} runs" in result["explain"]
    assert ("ratio_to_piecewise" in result) == (transport == "tcp")
    if transport == "tcp":
        check_figures(result, "piecewise_gb_s", "ratio_to_piecewise", "piecewise_pieces")
        assert 0 < result["piecewise_nbytes"] <= result["src_nbytes"]


@pytest.mark.parametrize("memory", ["pool", "foreign"])
def test_pages_between_layouts_can_be_read(memory: str) -> None:
    layouts = ["--src-layout", "tp4+fp8", "--dst-layout", "tp2+hnd", "--shape", "Llama-3.1-8B"]
    result = result_of(*PAGES, *layouts, "--op", "read", "--memory", memory)
    assert (result["op"], result["memory"], result["shape"]) == ("read", memory, "Llama-3.1-8B")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_handover_is_reported_in_its_stages(transport: str) -> None:
    # A prefill long enough that a push is posted during it even on a busy machine.
    prefill = ["--prefill-ms-per-layer", "5"]
    result = result_of(*HANDOVER, *prefill, "--requests", "6", "--transport", transport)
    assert (result["rails"], result["requests"]) == ([transport], 6)
    assert result["total_nbytes"] == result["num_pages"] * result["page_nbytes"]
    assert result["total_nbytes"] >= result["tokens"] * result["block_nbytes"] // 16
    assert set(result["stages_ms"]) == STAGES
    assert all(set(stage) == PERCENTILES for stage in result["stages_ms"].values())
    check_figures(result, "requests", "gb_per_s", "limit_ratio", "cpu_s_per_gib")
    check_figures(result["rss_mib"], "prefill", "decode")
    assert result["stages_ms"]["post"]["p50"] < 0


@pytest.mark.parametrize(
    ("transport", "wait", "more"),
    [
        ("shm", "poll", []),
        ("shm", "event", []),
        # A page that does not fit into a socket at once.
        ("unix", "event", ["--nbytes", "4194304"]),
        ("tcp", "poll", []),
        ("tcp", "event", []),
    ],
)
def test_latency_is_measured_over_what_was_asked_for(transport: str, wait: str, more: list[str]) -> None:
    result = result_of("latency", "--transport", transport, "--wait", wait, "--iterations", "60", *more)
    assert result["rails"] == [transport]
    assert 0 < result["min_us"] <= result["p50_us"] <= result["p90_us"] <= result["p99_us"]
    check_figures(result, "post_us", "limit_us")
    ratio = result["limit_us"] / result["p50_us"]
    assert result["limit_ratio"] == pytest.approx(ratio, rel=0.01, abs=0.001)
    assert ("wake_us" in result) == ("wake_ups" in result) == (wait == "event")
    if wait == "event":
        check_figures(result, "wake_us", "wake_one_us")
        assert ("wake_two_us" in result) == (len(os.sched_getaffinity(0)) > 1)
        assert result["wake_ups"] == pytest.approx(result["p50_us"] / result["wake_us"], rel=0.01, abs=0.01)


@pytest.mark.parametrize(("src", "dst"), [("tp1", "tp1"), ("tp8", "tp4"), ("fp8+p64", "hnd")])
def test_plan_is_reported(src: str, dst: str) -> None:
    result = result_of(*PLAN, "--src-layout", src, "--dst-layout", dst)
    check_figures(result, "compile_ms", "post_ms", "post_ns_per_page")
    assert result["num_tokens"] >= 30 * 16
    assert result["num_pages"] == 4 * 2 * 30


@pytest.mark.parametrize(
    ("order", "memory", "transport"), [("layers", "pool", "shm"), ("blocks", "foreign", "tcp")]
)
def test_pages_are_parked_and_fetched(order: str, memory: str, transport: str) -> None:
    result = result_of(*PARKING, "--order", order, "--memory", memory, "--transport", transport)
    check_figures(result, "park_gb_s", "fetch_gb_s", "copy_gb_s", "park_ratio", "fetch_nt_ratio")
    assert result["num_pages"] * result["page_nbytes"] == 4 << 20


def test_pages_go_into_files_and_come_back(tmp_path: Path) -> None:
    result = result_of(*STORE, "--fio", "", "--pages-dir", str(tmp_path))
    assert [row["page_kib"] for row in result["rows"]] == result["page_kib"] == [16, 32]
    for row in result["rows"]:
        check_figures(row, "read_gb_s", "write_gb_s", "read_share", "write_share", "read_cpu_s_per_gib")
    assert result["opened"]["slots"] == 700
    check_figures(result["opened"], *OPENED)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_setup_measures_fresh_processes(transport: str) -> None:
    result = result_of("setup", "--transport", transport, "--iterations", "1", "--idle-s", "0.2")
    assert all(set(result[name]) == SPREAD for name in SETUP_FIGURES)
    check_figures(result, "import_ms", "create_ms", "connect_ms", "first_write_ms", "rss_mib")
    assert result["threads"]["median"] == 1


@pytest.mark.parametrize(
    ("series", "at_most"),
    [(("peers", "prefills"), 2), pytest.param(tuple(SERIES), 4, marks=pytest.mark.slow)],
)
def test_scale_has_every_series_and_step(series: tuple[str, ...], at_most: int) -> None:
    asked = ["--series", ",".join(series), "--at-most", str(at_most)]
    rows = result_of("scale", *asked, "--repeats", "1", "--total-mib", "8")["rows"]
    assert tuple(rows) == series
    assert [row["count"] for row in rows["peers"]] == [1, at_most]
    assert [row["count"] for row in rows["prefills"]] == [1, 2, 4][:at_most]
    assert all(set(row) == {"count", *COLUMNS[series]} for series in rows for row in rows[series])
    for row in rows["prefills"]:
        assert row["gb_per_s"] > 0
        assert 1 / row["count"] <= row["fairness"] + 1e-9 <= 1 + 1e-6


@pytest.mark.parametrize("command", ["trigger", "commands"])
def test_what_waits_in_an_agent_goes_once_it_may(command: str) -> None:
    waits = ["--wait-s", "0.1"] if command == "trigger" else []
    result = result_of(command, "--rounds", "3", *waits)
    assert len(result["delays"]) == 10
    for delay in result["delays"]:
        check_figures(delay, "waited_us", "p50_us", "p99_us")
    if command == "commands":
        check_figures(result["per_s"], "commands", "writes")


# ---- how it ends ----------------------------------------------------------------------------------

LAYOUTS = [*PAGES, "--src-layout", "nhd", "--dst-layout", "hnd"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (HANDOVER, "expected 0x"),
        ([*LAYOUTS, "--op", "write"], "token 0, head 0, dim 0 is 0x"),
        ([*LAYOUTS, "--op", "read"], "token 0, head 0, dim 0 is 0x"),
        (["latency", "--iterations", "60"], "expected 0x"),
    ],
)
def test_corrupted_byte_ends_with_status_1(command: list[str], words: str) -> None:
    assert words in result_of(*command, "--corrupt", status=1)["failure"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (PAGES, ("write over shm: 128 pages of 32 KiB", "ratio to this", "every byte checked")),
        (LAYOUTS, ("layers of Llama-3.1-70B", "plain copy: ", "then one layer of each")),
        ([*PAGES, "--copy-threads", "2,1"], ("with as many threads",)),
        (PLAN, ("compile ms", "posts a later transfer: one call")),
        (["latency", "--iterations", "60"], ("limit ratio", "1 is the limit")),
    ],
)
def test_table_goes_to_stdout_and_progress_to_stderr(command: list[str], words: tuple[str, ...]) -> None:
    done = bench(*command)
    assert done.returncode == 0, done.stderr
    for expected in words:
        assert expected in done.stdout
    assert "setting up two agents" in done.stderr


@pytest.mark.parametrize(
    ("more", "there", "not_there"),
    [
        ([], ("ms after prefill ended (p50; p99", "of the bytes moved"), ("GB/s", "decode may start", " -")),
        (
            ["--details"],
            ("before │", "after │", "limit: ", "decode may start", "every byte checked"),
            ("GB/s from", " -"),
        ),
        (["--details", "--prefill-ms-per-layer", "0"], ("GB/s from the first layer's", "after │"), (" -",)),
    ],
)
def test_a_handover_has_sentences_and_no_figure_that_looks_like_a_defect(
    more: list[str], there: tuple[str, ...], not_there: tuple[str, ...]
) -> None:
    # A pace that prefill can keep even on a busy machine.
    done = bench(*HANDOVER, "--prefill-ms-per-layer", "2", *more)
    assert done.returncode == 0, done.stderr
    for words in there:
        assert words in done.stdout
    for words in not_there:
        assert words not in done.stdout
    if not more:
        *_, ready, behind, checked = done.stdout.splitlines()
        assert ready.startswith("decode was ready ")
        assert "while prefill computed" in behind
        assert checked == "every byte checked"


@pytest.mark.parametrize(
    "scene",
    [scene if scene in BY_DAY else pytest.param(scene, marks=pytest.mark.slow) for scene in SCENES],
)
def test_what_a_daemon_costs_is_reported(scene: str) -> None:
    pytest.importorskip("fastapi")
    result = result_of(*DAEMON, "--scenes", scene)
    assert SCENES[scene].keys() <= result.keys()
    # An idle daemon may use no measurable processor time; this slow watcher has missed no events.
    check_figures(result, *(SCENES[scene].keys() - {"idle_cores", "laggard_missed", "grown_mib", "slowest"}))
