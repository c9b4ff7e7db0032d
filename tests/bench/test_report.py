"""``kvxfer bench report`` as a user starts it, on results of real runs."""

import re
from pathlib import Path

import pytest

from kvxfer import cli
from kvxfer.bench.report import results

pytest.importorskip("typer")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    pages = ["bench", "pages", "--total-mib", "2", "--iterations", "1", "--out", str(folder)]
    handover = ["bench", "handover", "--requests", "2", "--max-tokens", "32", "--prefill-ms-per-layer", "0.1"]
    assert cli.main(pages) == 0
    assert cli.main([*pages, "--block-kib", "4"]) == 0
    assert cli.main([*pages, "--corrupt"]) == 1
    assert cli.main([*handover, "--out", str(folder)]) == 0
    return folder


def copies(kept: Path, folder: Path, factor: float, num_runs: int = 6) -> Path:
    """Keeps the first real result several times, its rates multiplied."""
    result = results.read(kept).records[0].result
    for run in range(num_runs):
        rate = {key: value * factor * (1 + run / 1000) for key, value in result["gb_per_s"].items()}
        results.keep(folder, {**result, "gb_per_s": rate}, None)
    return folder


def test_every_bench_is_shown_with_its_figures_and_its_failures(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "report", str(kept)]) == 0
    shown = capsys.readouterr().out
    for words in (
        "pages: transport shm",
        "handover: model Llama-3.1-8B",
        "block 4 KiB",
        "check failed: ",
        "decode may start, p50, after prefill ended",
        "rate, p50, at prefill's pace",
        "ratio to the limit with non-temporal stores",
        "one run",
    ):
        assert words in shown
    # Figures have names in words, and arguments that were not given are not shown.
    assert not re.search(r"│ \S*[._]\S* ", shown)
    assert "device ," not in shown
    # A time before the end of prefill has no sign.
    assert "│ -" not in shown
    assert results.read(kept).records[0].machine["kernel"] in shown
    assert cli.main(["bench", "report", str(kept), str(kept)]) == 0
    shown = capsys.readouterr().out
    assert "decode may start, p50" in shown
    assert "│ -" not in shown


def test_two_directories_get_ratios_and_verdicts(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = copies(kept, tmp_path / "first", 1.0), copies(kept, tmp_path / "second", 2.0)
    assert cli.main(["bench", "report", str(second), str(first)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"rate, GB/s .* 0\.500 .* slower", shown)
    assert "cannot tell" in shown


def test_results_of_a_bench_that_is_not_known_are_shown_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = {"bench": "new", "rows": [{"peers": 3, "goodput_gb_per_s": 1.5}], "verified": True}
    results.keep(tmp_path, result, None)
    assert cli.main(["bench", "report", str(tmp_path)]) == 0
    assert "goodput, peers 3" in capsys.readouterr().out


def test_mistakes_are_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "there are no results" in error
    assert error.count("\n") == 1
