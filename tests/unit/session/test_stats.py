"""stats: an agent returns the keys of its type, with values of the declared types."""

from __future__ import annotations

import math
from typing import Any, get_type_hints

import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

from kvxfer import Agent, AgentStats
from kvxfer.session.stats import Budget, GateHolds, PeerStats


def is_budget(value: Any) -> bool:
    return all(
        isinstance(resource, str) and isinstance(used, int) and isinstance(limit, int)
        for resource, (used, limit) in value.items()
    )


def test_an_agent_returns_what_its_type_says() -> None:
    with Agent("prefill") as prefill, Agent("decode") as decode:
        prefill.connect_blocking(decode.address, 10)
        stats: Any = prefill.stats()
    hints = get_type_hints(AgentStats)
    assert set(stats) == set(hints)
    for name, hint in hints.items():
        assert hint in (Budget, GateHolds, list[PeerStats]) or isinstance(stats[name], hint), name
    assert is_budget(stats["strangers"])
    holds = stats["gate_holds"]
    assert list(holds) == [0.125 * 2**power for power in range(8)] + [math.inf]
    assert all(isinstance(number, int) for number in holds.values())
    assert sum(holds.values()) > 0
    (peer,) = stats["peers"]
    assert set(peer) == set(get_type_hints(PeerStats))
    assert peer["name"] == "decode"
    assert is_budget(peer["budget"])
    assert peer["budget"]
