import pytest

from kvxfer.bench.report import axis, plots

STAGES = {"post": -160.9, "first_layer": -154.6, "last_layer": 0.15, "decode_may_start": 0.34}


@pytest.mark.parametrize(
    "values", [[], [1.0], [1.003, 0.998], [0.4], [3.0, 0.9], [0.9, 9.5], [0.0004], [5000.0]], ids=str
)
def test_an_axis_of_ratios_has_ticks_on_both_sides_of_1_and_every_value_within(values: list[float]) -> None:
    found = axis.ratios(values, "second / first")
    assert min(found.ticks) < 1.0 < max(found.ticks)
    assert 1.0 in found.ticks
    assert list(found.ticks) == sorted(set(found.ticks))
    for value in (*values, *found.ticks):
        assert found.low <= value <= found.high or value in found.ticks
        assert 0 <= found.percent(value) <= 100
    assert 20 < found.percent(1.0) < 80


def test_the_end_of_a_push_is_drawn_apart_where_it_can_be_seen() -> None:
    whole, end = plots.timeline(STAGES, 1)
    assert "one run" in whole.caption
    assert whole.axis.unit == end.axis.unit == "ms from the end of prefill"
    (row,) = whole.rows
    tells = row.marks[-1]
    assert whole.axis.percent(tells.high) - whole.axis.percent(tells.low) < 1
    (row,) = end.rows
    assert [mark.kind for mark in row.marks] == ["moves", "tells"]
    for mark in row.marks:
        assert end.axis.percent(mark.high) - end.axis.percent(mark.low) > 10
    assert "waits" in whole.drawn()
    assert "waits" not in end.drawn()


def test_a_run_far_from_all_others_does_not_squeeze_them() -> None:
    found = plots.runs({"total_ms": [1.0, 1.01, 0.99, 1.02, 4.0], "post_ms": [1.0, 1.0, 1.01, 1.02, 0.99]})
    assert found is not None
    assert [row.label for row in found.rows] == ["total (far: 3.96)", "post"]
    assert found.axis.high < 1.2
    far = next(mark for mark in found.rows[0].marks if mark.kind == "far")
    assert found.axis.percent(far.low) == 100
    assert list(found.drawn()) == ["far"]
