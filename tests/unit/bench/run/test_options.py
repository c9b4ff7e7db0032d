import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvxfer.bench.compare.measure import CompareOptions
from kvxfer.bench.errors import BenchError
from kvxfer.bench.handover.measure import HandoverOptions
from kvxfer.bench.latency.measure import LatencyOptions
from kvxfer.bench.pages.measure import PagesOptions
from kvxfer.bench.scale.measure import ScaleOptions
from kvxfer.bench.setup import measure as setup
from kvxfer.bench.setup.measure import SetupOptions
from kvxfer.bench.work.models import MODELS

LAYOUTS = {"src_layout": "tp4", "dst_layout": "tp2"}


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        (PagesOptions, {"iterations": 0}, "--iterations must be at least 1, not 0"),
        (PagesOptions, {"total_mib": 1, "block_kib": 1025}, "is too small for a page of 1025 KiB"),
        (PagesOptions, {"timeout_s": 0.0}, "--timeout-s must be above 0 and at most 170, not 0"),
        (PagesOptions, {"transport": "unix"}, "use it with --memory foreign"),
        (PagesOptions, {"copy_threads": ()}, "--copy-threads is empty"),
        (
            PagesOptions,
            LAYOUTS | {"src_layout": "tp3"},
            "known are tp1 tp2 tp4 tp8; nhd hnd; bf16",
        ),
        (PagesOptions, LAYOUTS | {"src_layout": "tp2+tp4"}, "names 'tp2' and 'tp4': name only one tp"),
        (PagesOptions, LAYOUTS | {"transport": "unix"}, "use it with --memory foreign"),
        (CompareOptions, {"work": "sleep"}, "unknown --work 'sleep'; known are pages, latency, setup"),
        (CompareOptions, {"iterations": -1}, "--iterations must be at least 0, not -1"),
        (LatencyOptions, {"nbytes": 12}, "--nbytes must be a multiple of 8, not 12"),
        (SetupOptions, {"idle_s": 0.0}, "--idle-s must be above 0 and at most 30, not 0"),
        (ScaleOptions, {"series": ()}, "--series is empty"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_words(kind: Any, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BenchError) as caught:
        kind(**fields)
    assert words in str(caught.value)


@pytest.mark.parametrize("model", MODELS)
def test_defaults_fit_in_4_gib(model: str) -> None:
    shape = HandoverOptions(model=model).shape()
    pools_nbytes = 2 * shape.blocks_for(HandoverOptions().max_tokens) * shape.block_nbytes
    limit_nbytes = 2 * (256 << 20)
    assert pools_nbytes + limit_nbytes <= 3 << 30


def test_setup_measures_from_bytecode_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    environment = setup._environment(str(tmp_path))
    written = subprocess.run(
        [sys.executable, "-c", "import sys; print(sys.dont_write_bytecode, sys.pycache_prefix)"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert written.stdout.split() == ["False", str(tmp_path)]
