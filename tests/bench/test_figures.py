"""latency, plan, setup and scale run to their end, with real processes, and say what they are to say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from kvxfer.bench.errors import BenchError
from kvxfer.bench.latency import measure as latency
from kvxfer.bench.plan import measure as plan
from kvxfer.bench.scale import measure as scale
from kvxfer.bench.setup import measure as setup


def bench(*arguments: str, status: int = 0) -> dict[str, Any]:
    """Runs ``kvxfer bench`` and returns its one line of JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "kvxfer", "bench", *arguments, "--format", "json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == status, done.stderr
    (line,) = done.stdout.splitlines()
    result: dict[str, Any] = json.loads(line)
    return result


@pytest.mark.parametrize("wait", latency.WAITS)
@pytest.mark.parametrize("transport", latency.TRANSPORTS)
def test_latency_is_measured_over_what_was_asked_for(transport: str, wait: str) -> None:
    result = bench("latency", "--transport", transport, "--wait", wait, "--iterations", "60")
    assert result["verified"]
    assert result["rails"] == [transport]
    assert 0 < result["min_us"] <= result["p50_us"] <= result["p90_us"] <= result["p99_us"]
    assert result["post_us"] > 0
    assert result["limit_us"] > 0
    assert result["limit_ratio"] == pytest.approx(
        result["limit_us"] / result["p50_us"],
        rel=0.01,
        abs=0.001,  # as it is rounded
    )
    assert ("wake_us" in result) == ("wake_ups" in result) == (wait == "event")
    if wait == "event":
        assert min(result["wake_us"], result["wake_one_us"]) > 0
        assert ("wake_two_us" in result) == (len(os.sched_getaffinity(0)) > 1)
        assert result["wake_ups"] == pytest.approx(result["p50_us"] / result["wake_us"], rel=0.01, abs=0.01)


def test_a_byte_that_is_wrong_fails_latency() -> None:
    result = bench("latency", "--iterations", "60", "--corrupt", status=1)
    assert not result["verified"]
    assert "byte" in result["failure"]


def test_plan_counts_pages_and_loops() -> None:
    result = bench("plan", "--layers", "8", "--blocks", "32", "--iterations", "5")
    assert result["num_pages"] == 8 * 2 * 32
    # Caches of one layout: a layer is keys and values, and those of a block are apart.
    assert 1 <= result["num_loops"] <= 2
    assert result["compile_ms"]["min"] > 0
    assert result["post_ms"]["min"] > 0


@pytest.mark.parametrize("transport", setup.TRANSPORTS)
def test_setup_measures_fresh_processes(transport: str) -> None:
    result = bench("setup", "--transport", transport, "--iterations", "1", "--idle-s", "0.2")
    for name in setup.FIGURES:
        assert result[name]["min"] <= result[name]["median"] <= result[name]["max"]
    assert result["import_ms"]["min"] > 0
    assert result["threads"]["median"] == 1
    assert result["rss_mib"]["min"] > 0


def test_scale_has_every_series_and_step() -> None:
    result = bench("scale", "--at-most", "4", "--repeats", "1", "--total-mib", "8")
    assert result["verified"]
    assert list(result["rows"]) == list(scale.SERIES)
    assert [row["count"] for row in result["rows"]["peers"]] == [1, 4]
    assert [row["count"] for row in result["rows"]["prefills"]] == [1, 2, 4]
    for series, rows in result["rows"].items():
        for row in rows:
            assert set(row) == {"count", *scale.COLUMNS[series]}
    for row in result["rows"]["prefills"]:
        assert row["gb_per_s"] > 0
        assert 1 / row["count"] <= row["fairness"] + 1e-9 <= 1 + 1e-6


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: latency.LatencyOptions(transport="pigeon"), "known are shm, unix, tcp"),
        (lambda: latency.LatencyOptions(wait="hope"), "known are poll, event"),
        (lambda: latency.LatencyOptions(nbytes=10), "multiple of 8"),
        (lambda: latency.LatencyOptions(iterations=0), "at least 1"),
        (lambda: plan.PlanOptions(layers=0), "at least 1"),
        (lambda: setup.SetupOptions(transport="unix"), "known are shm, tcp"),
        (lambda: setup.SetupOptions(idle_s=0), "above 0"),
        (lambda: scale.ScaleOptions(series=("elephants",)), "known are transfers"),
        (lambda: scale.ScaleOptions(at_most=0), "at least 1"),
    ],
)
def test_bad_options_are_named(make: Any, words: str) -> None:
    with pytest.raises(BenchError, match=words):
        make()


def test_steps_end_with_the_most() -> None:
    options = scale.ScaleOptions(at_most=500)
    assert options.steps("transfers") == [1, 10, 100, 500]
    assert options.steps("peers") == [1, 10, 100, 200]
    assert options.steps("prefills") == [1, 2, 4, 8, 16]
