from typing import Any

from kvxfer.bench.report.results import Record
from kvxfer.bench.report.runs import gather

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
