import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvxfer.bench.compare import baseline as baselines
from kvxfer.bench.compare.baseline import Baseline, chosen_baselines, known_baselines
from kvxfer.bench.compare.measure import FIGURES, CompareOptions, ratios, rotated
from kvxfer.bench.errors import BenchError
from kvxfer.bench.setup.measure import FIGURES as SETUP_FIGURES


def test_every_system_is_first_and_last_once_in_as_many_rounds() -> None:
    names = ["kvxfer", "nixl", "mooncake"]
    orders = [rotated(names, index) for index in range(3)]
    assert orders[0] == names
    assert {order[0] for order in orders} == {order[-1] for order in orders} == set(names)
    assert all(sorted(order) == sorted(names) for order in orders)


def figures(rate: float, ms: float) -> dict[str, float]:
    return {"gb_per_s": rate, "total_ms": ms, "post_ms": ms, "cpu_s_per_gib": ms}


def test_ratio_is_above_1_where_kvxfer_is_better_whatever_way_the_figure_counts() -> None:
    found = ratios("pages", [{"kvxfer": figures(6.0, 2.0), "nixl": figures(3.0, 8.0)}])
    assert found["nixl"]["gb_per_s"]["median"] == 2.0
    assert found["nixl"]["total_ms"]["median"] == 4.0


def test_ratio_below_1_is_kept() -> None:
    found = ratios("pages", [{"kvxfer": figures(3.0, 8.0), "nixl": figures(6.0, 2.0)}])
    assert found["nixl"]["gb_per_s"]["median"] == 0.5
    assert found["nixl"]["total_ms"]["median"] == 0.25


def test_ratios_are_taken_within_a_round_and_then_spread() -> None:
    rounds = [
        {"kvxfer": figures(4.0, 1.0), "nixl": figures(1.0, 1.0)},
        {"nixl": figures(1.0, 1.0), "kvxfer": figures(2.0, 1.0)},
        {"kvxfer": figures(9.0, 1.0), "nixl": figures(3.0, 1.0)},
    ]
    found = ratios("pages", rounds)["nixl"]["gb_per_s"]
    assert found == {"min": 2.0, "median": 3.0, "max": 4.0, "rounds": [4.0, 2.0, 3.0]}


def test_rounds_without_both_systems_give_no_ratio() -> None:
    rounds = [
        {"kvxfer": figures(4.0, 1.0)},
        {"nixl": figures(1.0, 1.0)},
        {"kvxfer": figures(4.0, 1.0), "nixl": figures(2.0, 1.0)},
    ]
    assert ratios("pages", rounds)["nixl"]["gb_per_s"]["rounds"] == [2.0]
    assert ratios("pages", rounds[:2]) == {}


def test_idle_cores_that_a_clock_cannot_tell_apart_are_equal() -> None:
    def idle(cores: float) -> dict[str, float]:
        return {**dict.fromkeys(FIGURES["setup"], 1.0), "idle_cpu_cores": cores}

    found = ratios("setup", [{"kvxfer": idle(0.0), "nixl": idle(0.0004), "nixl+thread": idle(1.0)}])
    assert found["nixl"]["idle_cpu_cores"]["median"] == 1.0
    assert found["nixl+thread"]["idle_cpu_cores"]["median"] == 1000.0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"work": "sleep"}, "unknown --work 'sleep'; known are pages, latency, setup"),
        ({"transport": "unix"}, "unknown --transport 'unix'; known are shm, tcp"),
        ({"against": ()}, "--against names nothing"),
        ({"rounds": 0}, "--rounds is at least 1, not 0"),
        ({"iterations": -1}, "--iterations is at least 0, not -1"),
        ({"memory": "tape"}, "unknown --memory 'tape'"),
        ({"work": "latency", "nbytes": 5}, "--nbytes is a multiple of 8, not 5"),
        ({"timeout_s": 0.0}, "--timeout-s is above 0"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_words(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BenchError) as caught:
        CompareOptions(**fields)
    assert words in str(caught.value)


def test_iterations_suit_the_work_unless_given() -> None:
    assert CompareOptions(work="pages").num_iterations == 5
    assert CompareOptions(work="latency").num_iterations == 500
    assert CompareOptions(work="setup").num_iterations == 1
    assert CompareOptions(work="latency", iterations=7).latency_options().iterations == 7


def test_every_figure_of_our_set_up_is_compared() -> None:
    assert set(FIGURES["setup"]) == {*SETUP_FIGURES, "connect_and_write_ms"}


def test_software_that_is_not_installed_says_which_command_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(baselines.ENVIRONMENTS_VARIABLE, str(tmp_path))
    with pytest.raises(BenchError, match=r"mooncake is not installed: .* `make baselines` installs it"):
        chosen_baselines(("mooncake",), known_baselines())


def test_unknown_software_is_named() -> None:
    with pytest.raises(BenchError, match="unknown --against 'ucx'; known are nixl, mooncake"):
        chosen_baselines(("nixl", "ucx"), known_baselines())


def test_one_name_chooses_every_variant_of_it() -> None:
    known = tuple(
        Baseline(name, software, (sys.executable,), {})
        for name, software in (("a", "s"), ("a+thread", "s"), ("b", "t"))
    )
    assert [baseline.name for baseline in chosen_baselines(("s",), known)] == ["a", "a+thread"]


def test_baselines_say_a_path_for_every_transport_and_something_about_themselves() -> None:
    for baseline in known_baselines():
        assert set(baseline.paths) == {"shm", "tcp"}
        assert baseline.notes


def load(name: str) -> ModuleType:
    """Returns a module of the baselines, which is no part of the package when it runs."""
    path = Path(baselines.__file__).resolve().parent / "baselines" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page_data() -> ModuleType:
    return load("page_data")


@pytest.mark.parametrize("pattern", ["random", "runs", "contiguous"])
def test_baseline_pages_are_named_once_each(page_data: ModuleType, pattern: str) -> None:
    order = page_data.page_order(pattern, 100, 3)
    assert sorted(order.tolist()) == list(range(100))
    assert order.dtype == np.int32


def test_baseline_check_finds_wrong_bytes_pages_and_iterations(page_data: ModuleType) -> None:
    memory = np.zeros(64 * 4096, np.uint8)
    data = page_data.PageData(memory, 4096)
    order = page_data.page_order("random", 64, 3)
    data.fill(order, 5)
    assert data.check(order, 5) == ""
    assert "of page 0 is" in data.check(order, 4)
    assert "of page 0 is" in data.check(np.roll(order, 1), 5)
    memory[int(order[9]) * 4096 + 7] ^= 1
    assert data.check(order, 5).startswith("byte 7 of page 9 is 0x")


@pytest.mark.parametrize("module", ["worker", "page_data", "nixl_adapter", "mooncake_adapter"])
def test_baselines_run_without_kvxfer(module: str) -> None:
    source = (Path(baselines.__file__).resolve().parent / "baselines" / f"{module}.py").read_text()
    assert "import kvxfer" not in source
    assert "from kvxfer" not in source
