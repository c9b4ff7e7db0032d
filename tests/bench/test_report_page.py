"""The page of ``kvxfer bench report --html`` in a real Chromium: phone and desktop, light and dark."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvxfer import cli
from kvxfer.bench.report import results

pytest.importorskip("typer")
pytest.importorskip("selenium", reason="selenium is not installed")

from tests.control.browser import Page, browser, missing

in_browser = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(missing()), reason=f"not installed: {', '.join(missing())}"),
]
SPREAD = {"min": 1.0, "median": 2.0, "max": 3.0}
PERCENTILES = {"p50": 0.3, "p90": 0.4, "p99": 0.5}
PAGES: dict[str, Any] = {
    "bench": "pages",
    "transport": "shm",
    "device": "",
    "gb_per_s": SPREAD,
    "limit_nt_ratio": 0.9,
    "verified": True,
}
HANDOVER: dict[str, Any] = {
    "bench": "handover",
    "transport": "shm",
    "prefill_ms_per_layer": 5.0,
    "stages_ms": {
        "post": dict.fromkeys(PERCENTILES, -160.9),
        "first_layer": dict.fromkeys(PERCENTILES, -154.6),
        "last_layer": dict.fromkeys(PERCENTILES, 0.15),
        "notification": dict.fromkeys(PERCENTILES, 0.15),
        "decode_may_start": PERCENTILES,
    },
    "gb_per_s": PERCENTILES,
    "verified": True,
}


def kept(folder: Path, rate: float, num_runs: int) -> Path:
    """Keeps runs of both benches; their rates vary within one percent."""
    for run in range(num_runs):
        times = rate * (1 + run / 500)
        spread = {name: value * times for name, value in SPREAD.items()}
        results.keep(folder, {**PAGES, "gb_per_s": spread}, None)
        results.keep(folder, HANDOVER, None)
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("report")
    runs = {
        "one": [kept(folder / "one", 1.0, 1)],
        "many": [kept(folder / "many", 1.0, 6)],
        "two": [kept(folder / "first", 1.0, 6), kept(folder / "second", 2.0, 6)],
    }
    made = {}
    for name, folders in runs.items():
        made[name] = folder / f"{name}.html"
        assert cli.main(["bench", "report", *map(str, folders), "--html", str(made[name])]) == 0
    return made


def test_a_page_that_cannot_be_written_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = str(kept(tmp_path / "runs", 1.0, 1))
    assert cli.main(["bench", "report", where, "--html", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "--html" in error
    assert "name another file" in error
    assert error.count("\n") == 1


def test_words_of_a_result_are_no_markup(tmp_path: Path) -> None:
    results.keep(tmp_path, {**PAGES, "device": "<img src=x onerror=alert(1)>"}, None)
    page = tmp_path / "page.html"
    assert cli.main(["bench", "report", str(tmp_path), "--html", str(page)]) == 0
    assert "<img" not in page.read_text()
    assert "&lt;img" in page.read_text()


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as opened:
        yield opened


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    list(itertools.product(("one", "many", "two"), (420, 1440), ("light", "dark"))),
)
class TestInABrowser:
    pytestmark = in_browser

    @pytest.fixture(autouse=True)
    def opened(self, page: Page, files: dict[str, Path], name: str, width: int, scheme: str) -> None:
        page.wear(scheme)
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 600}
        page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        page.driver.get(files[name].as_uri())

    def test_nothing_sticks_out_and_every_axis_has_its_unit_and_ticks(
        self, page: Page, name: str, width: int, scheme: str
    ) -> None:
        assert page.script("return document.documentElement.scrollWidth") <= width
        lightness = page.script(
            "return getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).slice(0, 3).map(Number)"
        )
        assert (sum(lightness) > 384) == (scheme == "light")
        told = page.script(
            """return Array.from(document.querySelectorAll("figure.plot"), plot => ({
                 unit: plot.querySelector(".axis .dim").textContent,
                 ticks: Array.from(plot.querySelectorAll(".axis b"), tick => {
                   const box = tick.getBoundingClientRect();
                   return [Number(tick.textContent), box.left, box.right]; }),
                 drawn: Array.from(plot.querySelectorAll(".row u"), mark => mark.className.split(" ").pop()),
                 legend: Array.from(plot.querySelectorAll(".legend u"), mark => mark.className)}))"""
        )
        # A push and its end; and also runs or intervals, if there are several.
        assert len(told) == {"one": 2, "many": 4, "two": 2}[name]
        for plot in told:
            assert plot["unit"]
            ticks = [tick for tick, *_ in plot["ticks"]]
            assert len(ticks) >= 2
            if "/" in plot["unit"]:
                assert min(ticks) < 1 < max(ticks)
            for _, left, right in plot["ticks"]:
                assert 0 <= left < right <= width
            # Labels of an axis do not overlap.
            for (*_, right), (_, left, _) in itertools.pairwise(plot["ticks"]):
                assert right <= left
            assert set(plot["legend"]) <= set(plot["drawn"])

    def test_figures_have_words_and_no_heading_stands_alone(
        self, page: Page, name: str, width: int, scheme: str
    ) -> None:
        words = page.script("return document.body.innerText")
        assert "ratio to the limit with non-temporal stores" in words
        for key in ("limit_nt_ratio", "gb_per_s", "stages_ms", "device ,"):
            assert key not in words
        assert ("one run" in words) == (name == "one")
        followed = page.script(
            """return Array.from(document.querySelectorAll("h2"),
                                 each => each.nextElementSibling ? each.nextElementSibling.tagName : "")"""
        )
        assert followed
        assert set(followed) <= {"DIV", "FIGURE", "P"}
        assert not page.log()
