import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvxfer.bench.errors import BenchError
from kvxfer.bench.handover.measure import HandoverOptions
from kvxfer.bench.pages.measure import PagesOptions
from kvxfer.bench.setup import measure as setup
from kvxfer.bench.work.models import MODELS


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"transport": "pigeon"}, "unknown --transport 'pigeon'; known are shm, unix, tcp"),
        ({"op": "swap"}, "unknown --op 'swap'; known are write, read"),
        ({"pattern": "zigzag"}, "unknown --pattern 'zigzag'"),
        ({"memory": "tape"}, "unknown --memory 'tape'"),
        ({"iterations": 0}, "--iterations is at least 1, not 0"),
        ({"block_kib": -4}, "--block-kib is at least 1, not -4"),
        ({"total_mib": 1, "block_kib": 1025}, "holds no block of 1 x 1025 KiB"),
        ({"timeout_s": 0.0}, "--timeout-s is above 0 and at most 50, unlike 0"),
        ({"transport": "unix"}, "use it with --memory foreign"),
    ],
)
def test_pages_options_that_do_not_fit_are_refused_in_words(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BenchError) as caught:
        PagesOptions(**fields)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"transport": "unix"}, "unknown --transport 'unix'; known are shm, tcp"),
        ({"mode": "throw"}, "unknown --mode 'throw'; known are push, pull"),
        ({"model": "GPT-2"}, "unknown model 'GPT-2'; known are Llama-3.1-8B"),
        ({"requests": 0}, "--requests is at least 1"),
        ({"concurrency": 0}, "--concurrency is at least 1"),
        ({"prefill_ms_per_layer": -1.0}, "--prefill-ms-per-layer"),
        ({"tp": 3}, "--tp 3 does not divide the 8 KV heads"),
        ({"arrivals": "daily"}, "unknown --arrivals 'daily'; known are closed, poisson, trace"),
        ({"decodes": 0}, "--decodes is at least 1, not 0"),
        ({"rate": 0.0}, "--rate is above 0, unlike 0"),
        ({"speedup": -1.0}, "--speedup is above 0, unlike -1"),
        ({"prefix_reuse": True, "model": "Gemma-3-27B"}, "--prefix-reuse is for models whose layers all"),
    ],
)
def test_handover_options_that_do_not_fit_are_refused_in_words(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BenchError) as caught:
        HandoverOptions(**fields)
    assert words in str(caught.value)


def test_layers_share_the_total() -> None:
    options = PagesOptions(total_mib=64, block_kib=16, layers=4)
    assert options.num_blocks == 1024
    assert options.num_pages == 4096
    assert options.total_nbytes == 64 << 20


@pytest.mark.parametrize("model", MODELS)
def test_defaults_fit_in_4_gib(model: str) -> None:
    options = HandoverOptions(model=model)
    groups = zip(options.shape().groups, options.num_blocks(), strict=True)
    pools_nbytes = 2 * sum(num_blocks * group.block_nbytes for group, num_blocks in groups)
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
