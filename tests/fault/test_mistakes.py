"""A mistake of kvxfer's own, in the middle of an agent's work, ends that agent and nothing else."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from kvxfer import Agent, AgentOptions
from kvxfer.errors import AgentError, KvxferError
from tests.fault.node import BOUND_S


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_mistake_in_a_round_ends_the_agent_in_words(transport: str) -> None:
    broken = AgentOptions(transports=(transport, "tcp"), faults="mistake=1")
    far = Agent("far")
    target = far.register("kv", np.zeros((4, 64), np.uint8))
    near = Agent("near", broken)
    waiting = asyncio.ensure_future(near.accept("nobody"))
    errors: list[BaseException] = []

    def block() -> None:
        try:
            near.accept_blocking("nobody")
        except BaseException as error:
            errors.append(error)

    blocked = threading.Thread(target=block, daemon=True)
    blocked.start()
    with pytest.raises(KvxferError):
        await near.connect(far.address, BOUND_S)
    with pytest.raises(AgentError, match=r"because of a mistake of kvxfer's \(injected fault") as caught:
        await asyncio.wait_for(waiting, BOUND_S)
    assert caught.value.code == "internal"
    await asyncio.to_thread(blocked.join, BOUND_S)
    assert [error.code for error in errors if isinstance(error, AgentError)] == ["internal"]
    assert near.closed
    with pytest.raises(AgentError, match="make a new agent"):
        near.register("kv", np.zeros((4, 64), np.uint8))
    await near.aclose()
    with Agent("near") as again:
        source = again.register("kv", np.ones((4, 64), np.uint8))
        peer = await again.connect(far.address, BOUND_S)
        target.grant(await far.accept("near", BOUND_S), mode="write")
        await again.write(source, await peer.region("kv"), [1], [2])
    await far.aclose()
