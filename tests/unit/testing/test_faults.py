"""testing.faults: the native parser reads exactly what a plan writes."""

from __future__ import annotations

import pytest

from kvxfer.errors import UsageError


def test_plan_as_text() -> None:
    pytest.importorskip("kvxfer._native", reason="the native module is not built")
    from kvxfer.testing import FaultPlan

    plan = FaultPlan(seed=4294967295, again=0.25, down_after=2000000)
    assert str(plan) == "seed=4294967295,again=0.25,delay=0,reorder=0,fail=0,down_after=2000000"
    assert plan.loses_rails
    assert not FaultPlan(delay=0.5).loses_rails
    with pytest.raises(UsageError):
        FaultPlan(fail=1.5)
    with pytest.raises(UsageError):
        FaultPlan(seed=-1)
