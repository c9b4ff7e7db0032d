import math
import xml.etree.ElementTree as ElementTree

import pytest

from kvxfer.bench.report import html, plots
from kvxfer.bench.report.html import Markup
from kvxfer.bench.report.plots import Bar, Interval


def parse(plot: Markup) -> ElementTree.Element:
    return ElementTree.fromstring(plot.text)


def numbers(root: ElementTree.Element, tag: str, name: str) -> list[float]:
    return [float(found.attrib[name]) for found in root.iter(tag)]


def test_bars_lie_on_one_axis_in_proportion() -> None:
    root = parse(plots.bars([Bar("a", [(0, 10, 0)]), Bar("b", [(10, 15, 1)])], "ms", ("x", "y"), (10,)))
    rects = [r for r in root.iter("rect") if r.attrib["height"] == "14"]
    widths = [float(r.attrib["width"]) for r in rects]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.2)
    ends = float(rects[0].attrib["x"]) + widths[0]
    assert ends == pytest.approx(float(rects[1].attrib["x"]), abs=0.2)
    dashed = [line for line in root.iter("line") if "stroke-dasharray" in line.attrib]
    assert float(dashed[0].attrib["x1"]) == pytest.approx(ends, abs=0.2)


def test_inner_segments_leave_the_outer_ones_to_be_seen() -> None:
    root = parse(plots.bars([Bar("a", [(0, 10, 0)], inner=[(2, 10, 1)])], "ms", ("x", "", "y")))
    outer, inner = (r for r in root.iter("rect") if float(r.attrib["height"]) != 10)
    assert float(inner.attrib["height"]) < float(outer.attrib["height"])
    assert float(inner.attrib["y"]) > float(outer.attrib["y"])
    assert [text.text for text in root.iter("text") if text.text in ("x", "", "y")] == ["x", "y"]


def test_intervals_are_logarithmic_around_the_mark() -> None:
    root = parse(plots.intervals([Interval("half", 0.5, 0.5, 0.5), Interval("double", 2, 2, 2)], "ratio"))
    half, double = numbers(root, "circle", "cx")
    mark = next(float(line.attrib["x1"]) for line in root.iter("line") if "stroke-dasharray" in line.attrib)
    assert mark - half == pytest.approx(double - mark, abs=0.2)


def test_histogram_counts_every_value_once() -> None:
    root = parse(plots.distribution([1.0, 1.0, 1.0, 2.0], "ms", num_bins=10))
    heights = sorted(numbers(root, "rect", "height"))
    assert heights[1] == pytest.approx(3 * heights[0], abs=0.2)
    assert len(heights) == 2


@pytest.mark.parametrize("values", [[3.0], [0.0, 0.0], [-1e-9, 1e9]])
def test_any_values_can_be_drawn(values: list[float]) -> None:
    for plot in (
        plots.distribution(values, "x"),
        plots.strip(values, min(values), max(values)),
        plots.bars([Bar("row", [(value, value, 0)], [(value, 1)]) for value in values], "x"),
    ):
        text = plot.text
        parse(plot)
        assert "nan" not in text
        assert "inf" not in text


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 12), (0.001, 0.0034), (1e6, 2.5e6)])
def test_ticks_are_round_and_within(low: float, high: float) -> None:
    found = plots.ticks(low, high)
    assert 3 <= len(found) <= 12
    assert all(low - 1e-9 * abs(low) <= tick <= high * (1 + 1e-9) for tick in found)
    step = found[1] - found[0]
    assert round(step / 10 ** math.floor(math.log10(step) + 1e-9)) in (1, 2, 5)


def test_page_escapes_what_is_not_markup() -> None:
    document = html.page(
        "<b>", [html.paragraph("a<script>", html.element("em", "x&y")), html.table(("h<",), [("c<",)])]
    )
    assert "<script>" not in document
    assert "a&lt;script&gt;<em>x&amp;y</em>" in document
    assert "<td>c&lt;</td>" in document
    assert "<title>&lt;b&gt;</title>" in document


def test_label_of_a_plot_is_escaped() -> None:
    parse(plots.bars([Bar('<"&', [(0, 1, 0)])], "<ms>", ("<legend>",)))
