"""``kvxfer bench report`` as a user starts it, on results that were kept by real runs."""

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvxfer import cli
from kvxfer.bench.report import results

pytest.importorskip("typer")

_VOID = {"meta", "br"}


class Tags(HTMLParser):
    """Checks that what opens is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_page(path: Path) -> str:
    """Well-formed, and nothing in it is fetched from elsewhere."""
    text = path.read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert not re.search(r'(src|href)\s*=\s*"[^#]|@import|url\([^#]', text)
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)
    return text


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


def test_one_page_shows_every_bench_its_figures_and_its_failures(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "report", str(kept)]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == kept / "report.html"
    text = check_page(path)
    assert "<h2>pages</h2>" in text
    assert "<h2>handover</h2>" in text
    assert "block_kib 4" in text
    assert "check failed: " in text
    assert "stages_ms.decode_may_start.p50" in text
    assert "<svg" in text
    assert results.read(kept).records[0].machine["kernel"] in text


def test_two_directories_get_ratios_and_verdicts(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = copies(kept, tmp_path / "first", 1.0), copies(kept, tmp_path / "second", 2.0)
    page = tmp_path / "page.html"
    assert cli.main(["bench", "report", str(first), str(second), "--html", str(page)]) == 0
    text = check_page(page)
    assert re.search(r'<span class="good">faster</span>', text)
    assert "cannot tell" in text
    capsys.readouterr()
    assert cli.main(["bench", "report", str(second), str(first), "--format", "table"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"gb_per_s\.median.* 0\.500 .* slower", out)


def test_results_of_a_bench_that_is_not_known_are_shown_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = {"bench": "<new>", "rows": [{"peers": 3, "goodput_gb_per_s": 1.5}], "verified": True}
    results.keep(tmp_path, result, None)
    assert cli.main(["bench", "report", str(tmp_path)]) == 0
    text = check_page(tmp_path / "report.html")
    assert "<h2>&lt;new&gt;</h2>" in text
    assert "rows [peers 3] goodput_gb_per_s" in text
    assert cli.main(["bench", "report", str(tmp_path), "--format", "table"]) == 0
    assert "peers 3" in capsys.readouterr().out


def test_line_of_another_version_is_left_out_in_words(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copies(kept, tmp_path, 1.0, num_runs=1)
    newer = json.loads((tmp_path / results.FILE_NAME).read_text())
    with (tmp_path / results.FILE_NAME).open("a") as file:
        file.write(json.dumps({**newer, "version": 9}) + "\n")
    assert cli.main(["bench", "report", str(tmp_path)]) == 0
    assert "no record of version 1" in capsys.readouterr().err
    assert "no record of version 1" in check_page(tmp_path / "report.html")


def test_mistakes_are_one_line_and_status_2(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in (
        ([str(tmp_path)], "there are no results"),
        ([str(kept), "--html", str(kept / "no" / "page.html")], "the page cannot be written: No such file"),
    ):
        assert cli.main(["bench", "report", *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
