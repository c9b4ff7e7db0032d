"""How many CTAs stage pages, against the same computation with exact fractions."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("kvxfer._native", reason="the native module is not built")

from kvxfer.gpu.calibration import Calibration

if TYPE_CHECKING:
    from kvxfer._native import GpuCtaSample

_NBYTES = 4 << 20
# Times that are often near each other, and any others.
_NS = st.one_of(st.integers(160, 180), st.integers(1, (1 << 48) - 1))
_SAMPLES = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 8), st.just(_NBYTES), _NS), max_size=24)


def expected(samples: list[GpuCtaSample]) -> int:
    best: dict[int, dict[int, int]] = {}
    for direction, num_ctas, _, ns in samples:
        of_direction = best.setdefault(direction, {})
        of_direction[num_ctas] = min(ns, of_direction.get(num_ctas, ns))
    numbers = set.intersection(*(set(found) for found in best.values())) if best else set()
    if not numbers:
        return 4
    worse = {
        num: max(Fraction(found[num], min(found.values())) for found in best.values()) for num in numbers
    }
    near = [num for num in numbers if worse[num] <= Fraction(17, 16)]
    return min(near) if near else min(numbers, key=lambda num: (worse[num], num))


@given(_SAMPLES)
def test_the_fewest_ctas_near_the_best_both_ways(samples: list[GpuCtaSample]) -> None:
    assert Calibration((), tuple(samples)).num_ctas == expected(samples)


@given(_SAMPLES.flatmap(lambda samples: st.tuples(st.just(samples), st.permutations(samples))))
def test_the_order_of_samples_is_nothing(both: tuple[list[GpuCtaSample], list[GpuCtaSample]]) -> None:
    assert Calibration((), tuple(both[0])).num_ctas == Calibration((), tuple(both[1])).num_ctas


@given(_SAMPLES, st.integers(1, 1000))
def test_a_slower_machine_takes_as_many(samples: list[GpuCtaSample], times: int) -> None:
    slower = tuple((way, num, nbytes, ns * times) for way, num, nbytes, ns in samples if ns < 1 << 30)
    whole = tuple(sample for sample in samples if sample[3] < 1 << 30)
    assert Calibration((), slower).num_ctas == Calibration((), whole).num_ctas
