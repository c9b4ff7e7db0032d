import numpy as np
import pytest

from kvxfer.bench.report.comparison import MIN_RUNS, compare_figure


def runs(around: float, num_runs: int, seed: int) -> list[float]:
    """With fixed seeds: a verdict about noise may be wrong once in twenty runs, and would then fail."""
    noise: list[float] = np.random.default_rng(seed).normal(1, 0.03, num_runs).tolist()
    return [around * factor for factor in noise]


def test_clear_gain_is_faster_for_rates_and_times_alike() -> None:
    slow, quick = runs(1.0, 10, 1), runs(2.0, 10, 2)
    assert compare_figure("gb_per_s.median", slow, quick).verdict == "faster"
    assert compare_figure("gb_per_s.median", quick, slow).verdict == "slower"
    assert compare_figure("total_ms.median", slow, quick).verdict == "slower"
    assert compare_figure("p50_us", quick, slow).verdict == "faster"
    assert compare_figure("cpu_s_per_gib", slow, quick).verdict == "worse"


def test_what_chance_may_explain_is_not_told_apart() -> None:
    one = compare_figure("total_ms.median", runs(1.0, 8, 7), runs(1.005, 8, 8))
    assert one.verdict == "cannot tell"
    assert one.bounds is not None


@pytest.mark.parametrize(
    ("figure", "first", "second", "why"),
    [
        ("p50_us", [1.0] * (MIN_RUNS - 1), [2.0] * 9, "5 runs of each are needed"),
        ("stages_ms.post.p50", [-1.0] * 5, [-2.0] * 5, "not above 0"),
        ("mystery", [1.0] * 5, [2.0] * 5, "does not say which way is better"),
    ],
)
def test_reason_for_no_verdict_is_said(
    figure: str, first: list[float], second: list[float], why: str
) -> None:
    one = compare_figure(figure, first, second)
    assert one.verdict == "cannot tell"
    assert why in one.in_words()
