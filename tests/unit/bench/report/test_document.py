import re
import xml.etree.ElementTree as ElementTree

import pytest

from kvxfer.bench.report import document, plots
from kvxfer.bench.report.document import Figure, Heading, Part, Table, Words
from kvxfer.bench.report.plots import Bar, Interval


def parse(svg: str) -> ElementTree.Element:
    assert not re.search(r"\b(nan|inf)\b", svg)
    return ElementTree.fromstring(svg)


@pytest.mark.parametrize("values", [[3.0], [0.0, 0.0], [-1e-9, 1e9]])
def test_any_values_can_be_drawn(values: list[float]) -> None:
    parse(plots.runs({"x": values}).svg)
    parse(plots.bars([Bar("row", [(value, value, "a")], [(value, "b")]) for value in values], "x"))


def test_a_plot_names_its_rows_unit_and_series_and_every_text_is_escaped() -> None:
    bars = plots.bars([Bar('<"$&', [(0, 1, "<a>")], [(2, "$b$")])], "<ms>")
    intervals = plots.intervals([Interval("half", 0.4, 0.5, 0.6, "bad"), Interval("2x", 2, 2, 2)], "ratio")
    for svg, words in ((bars, {'<"$&', "<a>", "$b$", "<ms>"}), (intervals, {"half", "2x", "ratio"})):
        assert words <= {text.text for text in parse(svg).iter("{http://www.w3.org/2000/svg}text")}


def test_a_page_and_a_terminal_show_the_same_words(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[list[str | Words]] = [["c<", "7"], [], ["[d]", Words("worse", "bad")]]
    parts: list[Part] = [
        Heading("h<2>"),
        Words("a<script>", "warn"),
        Table(("name<", "ms"), rows),
        Figure("<svg/>", "<f>"),
    ]
    page = document.page("<b>", parts)
    assert "<script>" not in page
    for shown in ("<title>&lt;b&gt;</title>", "<h2>h&lt;2&gt;</h2>", '<p class="warn">a&lt;script&gt;</p>'):
        assert shown in page
    assert '<td class="number"><span class="bad">worse</span></td>' in re.sub(r"\s+(?=<)", "", page)
    assert "<figure><svg/><figcaption>&lt;f&gt;" in page
    document.print_parts(parts)
    printed = capsys.readouterr().out
    for words in ("h<2>", "a<script>", "name<", "c<", "[d]", "worse"):
        assert words in printed
    assert "<svg/>" not in printed
