"""explain: what a transfer between two regions would do, in words that are true of the pair at hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

import kvxfer
from kvxfer import Agent, AgentOptions, KVLayout, UsageError
from kvxfer.plan import compile_program
from kvxfer.session.explanation import explain
from kvxfer.testing.pair import connected_pair


@pytest.mark.parametrize(
    ("transports", "memory", "rails"),
    [
        (("tcp",), "foreign", ["tcp"]),
        (("shm", "unix", "tcp"), "pool", ["shm", "unix; only while no better rail is up"]),
    ],
)
def test_a_pair_is_told_its_program_and_its_rails_in_order(
    transports: tuple[str, ...], memory: str, rails: list[str]
) -> None:
    with connected_pair(AgentOptions(transports=transports), memory=memory) as pair:
        here = pair.decode
        lines = here.agent.explain(here.region, here.remote).splitlines()
        program = compile_program(here.remote.layout, here.region.layout).explain()
    assert lines[0] == "read, from 'kv' of prefill to 'kv' here:"
    assert lines[1] == f"  {program}"
    said = [line.strip() for line in lines[2 : lines.index("write, from 'kv' here to 'kv' of prefill:")]]
    assert said[0].startswith("Over")
    assert list(dict.fromkeys(said[1:])) == rails
    assert "  The same copy program." in lines
    assert any("prefill takes the pages" in line for line in lines)


def test_conversion_is_said_of_each_direction() -> None:
    shape, axes = (2, 8, 4, 1, 32), "lbthd"
    with Agent("prefill") as prefill, Agent("decode") as decode:
        arrays = [np.zeros(shape, np.float32), np.zeros(shape, np.float16)]
        regions = [
            agent.register("kv", array, KVLayout.from_tensor(array, axes))
            for agent, array in zip((prefill, decode), arrays, strict=True)
        ]
        peer = decode.connect_blocking(prefill.address, 10)
        words = decode.explain(regions[1], peer.region_blocking("kv", 10))
    read, write = words.split("write, from")
    assert "from float32 (no scales) to float16" in read
    assert "from float16 (no scales) to float32" in write


def test_what_no_program_bridges_is_said_and_not_raised() -> None:
    with Agent("prefill") as prefill, Agent("decode") as decode:
        arrays = [np.zeros((2, 8, 4, 1, dim), np.float16) for dim in (32, 64)]
        regions = [
            agent.register(name, array, KVLayout.from_tensor(array, "lbthd"))
            for agent, name, array in zip((prefill, decode), ("a", "b"), arrays, strict=True)
        ]
        peer = decode.connect_blocking(prefill.address, 10)
        words = decode.explain(regions[1], peer.region_blocking("a", 10))
    assert words.count("Not possible: ") == 2
    assert "head_dim: 32 at the source, 64 at the destination" in words


def test_a_region_of_another_agent_and_one_that_is_gone_are_refused() -> None:
    with connected_pair() as pair:
        with pytest.raises(UsageError, match="this agent's register"):
            pair.decode.agent.explain(pair.prefill.region, pair.decode.remote)
        remote = pair.decode.remote
        pair.prefill.region.deregister_blocking()
        with pytest.raises(kvxfer.KvxferError, match=r"not registered|gone") as caught:
            pair.decode.agent.explain(pair.decode.region, _until_gone(pair, remote))
        assert caught.value.code in ("unknown-region", "region-gone")


def _until_gone(pair: Any, remote: Any) -> Any:
    while "kv" in pair.decode.peer.regions:
        pair.decode.agent.poll()
    return remote


class SomeRails:
    """A core that answers with rails that this machine has not: NICs, and memory of a GPU."""

    def __init__(self, ways: list[dict[str, Any]], node: int = -1) -> None:
        self._ways, self._node = ways, node

    def ways(self, peer: int, region: int, remote: int, converts: bool) -> list[dict[str, Any]]:
        assert (peer, converts) == (7, False)
        return self._ways

    def region_node(self, region: int) -> int:
        return self._node

    def peer_regions(self, peer: int) -> list[dict[str, Any]]:
        return []


def way(transport: str, rank: int, path: str = "", **fields: Any) -> dict[str, Any]:
    usual = {"is_far": False, "is_staged": False, "why_not": ""}
    return {"transport": transport, "rank": rank, "path": path, **usual, **fields}


def test_near_and_far_nics_staging_and_what_is_not_used_are_told() -> None:
    nics = [
        way("verbs", 2, "mlx5_0, by WRITE (measured: READ 9.8 GB/s, WRITE 11 GB/s)"),
        way("verbs", 3, "mlx5_1, by READ", is_far=True),
        way("tcp", 4, is_staged=True),
        way("shm", 1, why_not="it does not reach GPU memory here"),
    ]
    with connected_pair() as pair:
        core: Any = SomeRails(nics, node=1)
        lines = explain(core, 7, pair.decode.region, pair.decode.remote).splitlines()
        none: Any = SomeRails([])
        assert "  No rail can carry them now." in explain(none, 7, pair.decode.region, pair.decode.remote)
    assert [line.strip() for line in lines[2:7]] == [
        "Over:",
        "verbs: mlx5_0, by WRITE (measured: READ 9.8 GB/s, WRITE 11 GB/s)",
        "verbs: mlx5_1, by READ; far from this region's memory; only while no better rail is up",
        "tcp; staged through this host's memory; only while no better rail is up",
        "Not over shm: it does not reach GPU memory here.",
    ]
    assert lines[-2:] == ["'kv' here:", "  its pages lie on NUMA node 1"]
