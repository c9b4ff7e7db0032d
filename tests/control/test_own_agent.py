"""The daemon's own agent: which hosts it dials, and its name."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvxfer import AgentOptions, UsageError
from kvxfer.control.own.own_agent import OwnAgent
from kvxfer.errors import PeerError
from tests.control.engines import MakeDaemon, MakeEngine, options, parked


async def test_agents_of_two_nodes_with_other_models_meet(engine: MakeEngine, daemon: MakeDaemon) -> None:
    """Both number their regions alike; two agents refuse each other if regions of one name differ."""
    one, two = daemon("one"), daemon("two")
    await parked(one, engine("a"), 1)
    await parked(two, engine("b", shape=(3, 2, 24, 8, 4, 64)), 1)
    assert (await one.own.connect(two.own.name, two.own.address)).name == two.own.name


async def test_a_daemons_name_and_address_must_agree(daemon: MakeDaemon) -> None:
    one, two = daemon("one"), daemon("two")
    with pytest.raises(PeerError) as other:
        await one.own.connect("daemon/three", two.own.address)
    assert other.value.code == "peer-restarted"
    first, second = await asyncio.gather(*(one.own.connect("", two.own.address) for _ in range(2)))
    assert first is second is await one.own.connect("daemon/two")


async def test_few_of_a_host_are_dialled_at_a_time(daemon: MakeDaemon) -> None:
    import socket

    node = daemon(agent_options=replace(options(), connect_timeout_s=1.0))
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        port = silent.getsockname()[1]
        dials = [
            asyncio.create_task(node.own.connect("", f"tcp://127.0.0.{number}:{port}"))
            for number in range(1, 3)
        ]
        more = [
            asyncio.create_task(node.own.connect("", f"tcp://127.0.0.3:{port + number % 3}"))
            for number in range(20)
        ]
        await asyncio.gather(*dials, *more, return_exceptions=True)
    assert not node.own._dials._under_way
    assert not node.own._dials._of_host


@pytest.mark.parametrize("node", ["", "x" * 49, "a\nb"])
def test_a_node_has_a_name(node: str) -> None:
    with pytest.raises(UsageError):
        OwnAgent(node, AgentOptions())
