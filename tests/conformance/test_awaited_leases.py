"""Awaited leases: a lease holds at once, and its waiter wakes when the peer knows of the lease."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

from kvxfer import Agent, AgentOptions, LeaseState, PeerError, Region, TransferError
from kvxfer.errors import AgentError

BOUND_S = 30.0
# No heartbeat is due during a test: only a waiter makes the agent send one.
OPTIONS = AgentOptions(heartbeat_interval_s=600, silent_timeout_s=1200)


class Ends:
    """An owner of pages, and a reader that it knows."""

    def __init__(self, owner: Agent, reader: Agent) -> None:
        self.owner, self.reader = owner, reader
        self.region: Region = owner.register("kv", np.ones((16, 64), np.uint8))
        self.local: Region = reader.register("kv", np.zeros((16, 64), np.uint8))
        self.to_owner = reader.connect_blocking(owner.address, BOUND_S)
        self.to_reader = owner.accept_blocking("reader", BOUND_S)
        self.remote = self.to_owner.region_blocking("kv", BOUND_S)


@pytest.fixture
def ends() -> Iterator[Ends]:
    with Agent("owner", OPTIONS) as owner, Agent("reader", OPTIONS) as reader:
        yield Ends(owner, reader)


async def test_a_lease_is_awaited_and_returned(ends: Ends) -> None:
    for blocks in ([1, 2], None):
        lease = ends.region.grant(ends.to_reader, blocks)
        assert lease.active
        assert await asyncio.wait_for(lease, BOUND_S) is lease
        assert await lease is lease
    lease = await ends.region.grant(ends.to_reader, [3])
    await ends.reader.read(ends.local, ends.remote, [3], [3], lease=lease.token)


async def test_a_bearers_lease_is_told_to_nobody_and_waits_for_nobody(ends: Ends) -> None:
    lease = ends.region.grant(None, [1])
    assert lease.wait(0) is lease
    assert await lease is lease
    lease.revoke_blocking()
    with pytest.raises(TransferError) as caught:
        await lease
    assert caught.value.code == "lease-ended"


async def test_one_that_has_ended_says_how(ends: Ends) -> None:
    revoked, lost = (ends.region.grant(ends.to_reader, [block]) for block in (1, 2))
    other = ends.owner.register("other", np.ones((4, 64), np.uint8))
    gone = other.grant(ends.to_reader, [1])
    await revoked.revoke()
    await other.deregister()
    for lease, code in ((revoked, "lease-ended"), (gone, "region-gone")):
        for wait in (lambda lease=lease: lease.wait(BOUND_S), lambda lease=lease: asyncio.run(_await(lease))):
            with pytest.raises(TransferError, match="grant another") as caught:
                await asyncio.to_thread(wait)
            assert (caught.value.code, caught.value.peer) == (code, "reader")
    ends.to_reader.disconnect()
    with pytest.raises(PeerError):
        await lost
    with pytest.raises(PeerError):
        lost.wait(BOUND_S)


async def test_a_revocation_need_not_be_awaited_and_can_be(ends: Ends) -> None:
    left, awaited, task = (ends.region.grant(ends.to_reader, [block]) for block in (1, 2, 3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        left.revoke()
        gc.collect()
    assert not caught
    await awaited.revoke()
    await asyncio.create_task(task.revoke())
    assert {lease.state for lease in (left, awaited, task)} == {LeaseState.REVOKED}


async def _await(lease: object) -> None:
    await lease  # type: ignore[misc]


async def test_an_agent_that_closes_wakes_whoever_waits(ends: Ends) -> None:
    lease = ends.region.grant(ends.to_reader, [1])
    await ends.owner.aclose()
    with pytest.raises(AgentError):
        await lease
    with pytest.raises(AgentError):
        lease.wait(BOUND_S)
