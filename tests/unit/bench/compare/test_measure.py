from pathlib import Path

import pytest

from kvxfer.bench.compare import baseline as baselines
from kvxfer.bench.compare.baseline import chosen_baselines, known_baselines
from kvxfer.bench.compare.measure import FIGURES
from kvxfer.bench.compare.rounds import ratios, rotated
from kvxfer.bench.errors import BenchError
from kvxfer.bench.setup.measure import FIGURES as SETUP_FIGURES

MORE_IS_BETTER = {"gb_per_s": True, "total_ms": False}


def of(rate: float, ms: float) -> dict[str, float]:
    return {"gb_per_s": rate, "total_ms": ms}


def test_every_system_is_first_and_last_once_in_as_many_rounds() -> None:
    names = ["kvxfer", "nixl", "mooncake"]
    orders = [rotated(names, index) for index in range(3)]
    assert orders[0] == names
    assert {order[0] for order in orders} == {order[-1] for order in orders} == set(names)
    assert all(sorted(order) == sorted(names) for order in orders)


@pytest.mark.parametrize(
    ("ours", "theirs", "rate", "ms"),
    [((6.0, 2.0), (3.0, 8.0), 2.0, 4.0), ((3.0, 8.0), (6.0, 2.0), 0.5, 0.25)],
)
def test_ratio_is_above_1_where_kvxfer_is_better_whatever_way_the_figure_counts(
    ours: tuple[float, float], theirs: tuple[float, float], rate: float, ms: float
) -> None:
    found = ratios("kvxfer", MORE_IS_BETTER, [{"kvxfer": of(*ours), "nixl": of(*theirs)}])["nixl"]
    assert (found["gb_per_s"]["median"], found["total_ms"]["median"]) == (rate, ms)


def test_ratios_are_taken_within_rounds_that_have_both_and_then_spread() -> None:
    rounds = [
        {"kvxfer": of(4.0, 1.0), "nixl": of(1.0, 1.0)},
        {"nixl": of(1.0, 1.0)},
        {"nixl": of(1.0, 1.0), "kvxfer": of(2.0, 1.0)},
        {"kvxfer": of(9.0, 1.0)},
        {"kvxfer": of(9.0, 1.0), "nixl": of(3.0, 1.0)},
    ]
    found = ratios("kvxfer", MORE_IS_BETTER, rounds)["nixl"]["gb_per_s"]
    assert found == {"min": 2.0, "median": 3.0, "max": 4.0, "rounds": [4.0, 2.0, 3.0]}
    assert ratios("kvxfer", MORE_IS_BETTER, [rounds[1], rounds[3]]) == {}


def test_what_a_clock_cannot_tell_apart_is_equal() -> None:
    rounds = [{name: {"cores": cores} for name, cores in (("us", 0.0), ("them", 0.0004), ("others", 1.0))}]
    found = ratios("us", {"cores": False}, rounds, {"cores": 0.001})
    assert [found[name]["cores"]["median"] for name in ("them", "others")] == [1.0, 1000.0]


def test_every_figure_of_our_set_up_is_compared() -> None:
    assert set(FIGURES["setup"]) == {*SETUP_FIGURES, "connect_and_write_ms"}


def test_software_that_is_not_installed_says_which_command_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(baselines.ENVIRONMENTS_VARIABLE, str(tmp_path))
    with pytest.raises(BenchError, match=r"mooncake is not installed: .* run `make baselines`"):
        chosen_baselines(("mooncake",), known_baselines())
