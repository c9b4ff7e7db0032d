"""The ratios in the documents are those of docs/figures.json, and each has a command that gives it again."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def figures() -> Any:
    spec = importlib.util.spec_from_file_location("docs_figures", ROOT / "docs/figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_documents_have_the_ratios_of_the_file(figures: Any) -> None:
    for path, text in figures.documents().items():
        assert path.read_text() == text, "run `python docs/figures.py`"


def test_each_row_has_a_quiet_measurement_and_no_ratio_outside_of_its_spread(figures: Any) -> None:
    told = figures.figures()
    assert len({(row["what"], row["beside"]) for row in told["rows"]}) == len(told["rows"])
    for row in told["rows"]:
        assert figures.quiet(row), row["what"]
        for each in row["measured"]:
            assert each.keys() <= {"on", "date", "ratio", "spread", "others"}
            assert each["on"] in told["processors"]
            least, most = each.get("spread", (each["ratio"],) * 2)
            assert least <= each["ratio"] <= most, (row["what"], each)


def test_a_ratio_from_a_busy_machine_is_shown_and_is_not_in_the_range(
    figures: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {
        "what": "a",
        "beside": "b",
        "command": "c",
        "readme": "a",
        "measured": [
            {"on": "E", "date": "2026-01-02", "ratio": 2.5, "spread": [2.0, 3.0]},
            {"on": "Z", "date": "2026-01-03", "ratio": 9.0, "others": 0.8},
            {"on": "E", "date": "2026-01-01", "ratio": 1.5},
        ],
    }
    monkeypatch.setattr(figures, "figures", lambda: {"processors": {"E": "one", "Z": "two"}, "rows": [row]})
    assert figures.readme_text().splitlines() == [
        "E: one, 2026-01-01 to 02.",
        "",
        "| what | result | on | command |",
        "| --- | --- | --- | --- |",
        "| a | 1.5 to 2.5 × b | E | `c` |",
    ]
    assert figures.benchmarks_text().splitlines()[-1] == (
        "| a | b | **1.5 to 2.5** | 2.5 (2.0 to 3.0), 2026-01-02; 1.5, 2026-01-01 "
        "| 9.0, 2026-01-03, other work 80% | `c` |"
    )
