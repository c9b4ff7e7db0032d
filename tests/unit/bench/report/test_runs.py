from typing import Any

import pytest

from kvxfer.bench.report.results import Record
from kvxfer.bench.report.runs import better, figures, gather

PAGES = {
    "bench": "pages",
    "transport": "shm",
    "block_kib": 32,
    "timeout_s": 30.0,
    "total_ms": {"min": 1.0, "median": 2.0, "max": 9.0},
    "post_ms": 0.5,
    "limit": {"name": "shared-copy", "gb_per_s": 5},
    "copy_kernel": "avx2-nt",
    "verified": True,
}


def record(**changes: Any) -> Record:
    return Record({}, "2026-01-01T00:00:00+00:00", None, {**PAGES, **changes})


def test_runs_of_one_kind_are_gathered_whatever_the_machine_chose() -> None:
    (runs,) = gather([record(post_ms=0.5), record(post_ms=0.7, copy_kernel="avx512-nt")])
    assert runs.kind.bench == "pages"
    assert dict(runs.kind.arguments) == {"transport": "shm", "block_kib": "32", "timeout_s": "30"}
    assert runs.figures == {
        "total_ms.median": [2.0, 2.0],
        "post_ms": [0.5, 0.7],
        "limit.gb_per_s": [5.0, 5.0],
    }


def test_other_arguments_are_another_kind() -> None:
    first, _ = gather([record(), record(transport="tcp")])
    assert first.kind.in_words() == "pages: transport shm, block 32 KiB, timeout 30 s"


def test_rows_are_told_apart_by_their_arguments_wherever_they_are() -> None:
    rows = [{"layers": 1, "compile_ms": 0.5}, {"layers": 80, "compile_ms": 2.5, "latency_us": {"p50": 3}}]
    expected = {
        "[layers 1] compile_ms": 0.5,
        "[layers 80] compile_ms": 2.5,
        "[layers 80] latency_us.p50": 3.0,
    }
    assert dict(figures({"rows": rows})) == {f"rows {name}": value for name, value in expected.items()}
    assert dict(figures({"rows": {"of": rows}})) == {f"rows.of {name}": v for name, v in expected.items()}


def test_failed_run_gives_its_failure_and_no_figure() -> None:
    failed = {name: PAGES[name] for name in ("bench", "transport", "block_kib", "timeout_s")}
    broken = Record({}, "", None, {**failed, "verified": False, "failure": "byte 3"})
    (runs,) = gather([record(), broken])
    assert runs.failures == ["byte 3"]
    assert runs.figures["post_ms"] == [0.5]
    assert len(runs.records) == 2


@pytest.mark.parametrize(
    ("figure", "direction"),
    [
        ("gb_per_s.median", 1),
        ("limit_ratio", 1),
        ("ratio_to_plain", 1),
        ("stages_ms.post.p50", -1),
        ("wake_ups", -1),
        ("cpu_s_per_gib", -1),
        ("rss_mib.decode", -1),
        ("rows [peers 3] p99_us", -1),
        ("mystery", 0),
    ],
)
def test_name_tells_which_way_is_better(figure: str, direction: int) -> None:
    assert better(figure) == direction
