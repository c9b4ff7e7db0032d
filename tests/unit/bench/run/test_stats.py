import pytest

from kvxfer.bench.run.stats import gb_per_s, ideal_finish_ns, percentiles, spread


def test_spread_is_min_median_max() -> None:
    assert spread([3.0, 1.0, 2.0, 10.0]) == {"min": 1.0, "median": 2.5, "max": 10.0}


def test_percentiles_interpolate() -> None:
    assert percentiles(range(101)) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}


def test_rate_counts_units_of_1e9() -> None:
    assert gb_per_s(2_000_000_000, 1e9) == pytest.approx(2.0)


def test_ideal_mover_of_finished_pages_needs_the_plain_time() -> None:
    assert ideal_finish_ns([100, 100, 100], layers_nbytes=[50] * 3, limit_gb_per_s=1.0) == 250


def test_ideal_mover_waits_for_layers_that_are_not_final_yet() -> None:
    assert ideal_finish_ns([0, 1000, 1010], layers_nbytes=[50] * 3, limit_gb_per_s=1.0) == 1100
