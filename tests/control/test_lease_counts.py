"""How leases ended, as agents report it and /metrics counts it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

import kvxfer
from kvxfer.control.own.own_agent import OwnAgent
from kvxfer.control.state.lease_counts import LeaseCounts
from tests.control.engines import PATIENT
from tests.control.serving import Served, serving
from tests.waiting import until_on_loop

ONE, OTHER = "a" * 32, "b" * 32


def counted(*told: tuple[str, dict[str, int]]) -> dict[str, int]:
    """Returns the counts of what agents report, without zeros."""
    counts = LeaseCounts()
    for agent, each in told:
        counts.take(agent, each)
    return {way: count for way, count in counts.ended.items() if count}


def test_an_agent_is_counted_from_what_it_told_first() -> None:
    assert counted((ONE, {"expired": 5, "revoked": 7})) == {}
    assert counted((ONE, {"expired": 5}), (OTHER, {}), (OTHER, {"revoked": 1}), (ONE, {"expired": 7})) == {
        "expired": 2,
        "revoked": 1,
    }
    assert counted((ONE, {"expired": 5}), (ONE, {"expired": 3})) == {}, "a counter never falls"
    assert counted((ONE, {}), (ONE, {"of another kind": 3})) == {}


async def figures(served: Served) -> dict[str, float]:
    async with served.unix() as client:
        text = (await client.get("/metrics")).text
    found = re.findall(r'^kvxfer_leases_ended_total\{how="([a-z-]+)"\} (\S+)', text, re.M)
    return {how: float(count) for how, count in found if float(count)}


async def test_a_lease_that_ran_out_is_told_apart_from_one_that_was_revoked(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        options = kvxfer.AgentOptions(**PATIENT, daemon=str(tmp_path / "run"))
        async with kvxfer.Agent("a", options) as agent:
            region = agent.register("kv", np.zeros((4, 64), np.uint8))
            attached = served.daemon.links.agents
            await until_on_loop(lambda: [each for each in attached.values() if each.leases_ended])
            late, early, gone = (region.grant(None, ttl_s=60) for _ in range(3))
            (told,) = attached.values()
            await until_on_loop(lambda: len(told.leases) == 3)
            await early.revoke()
            short = region.grant(None, ttl_s=2.0)
            await until_on_loop(lambda: told.leases_ended["expired"] == 1)
            assert await figures(served) == {"expired": 1.0, "revoked": 1.0}
            await region.deregister()
            await until_on_loop(lambda: told.leases_ended["region-gone"] == 2)
            assert await figures(served) == {"expired": 1.0, "revoked": 1.0, "region-gone": 2.0}
            del late, gone, short


async def test_a_lease_of_the_daemons_own_that_ran_out_has_expired(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        options = kvxfer.AgentOptions(**PATIENT, daemon=str(tmp_path / "run"))
        own = OwnAgent("n", options)
        served.daemon.add_own(own, None)
        memory = np.zeros((4, 64), np.uint8)
        own.register("kv", memory, kvxfer.KVLayout.from_tensor(memory, "bd"))
        attached = served.daemon.links.agents
        await until_on_loop(lambda: [each for each in attached.values() if each.leases_ended])
        (told,) = attached.values()
        own.grant("kv", None, ttl_s=2.0)
        kept = own.grant("kv", None, ttl_s=60.0)
        await until_on_loop(lambda: told.leases_ended["revoked"] == 1)
        assert await figures(served) == {"expired": 1.0}
        await own.revoke(kept.number)
        await until_on_loop(lambda: told.leases_ended["revoked"] == 2)
        assert await figures(served) == {"expired": 1.0, "revoked": 1.0}
