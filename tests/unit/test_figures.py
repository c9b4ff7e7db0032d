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
