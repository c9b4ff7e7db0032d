"""One session for each incarnation of an agent, however many ask for it, and whoever leaves meanwhile."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

from kvxfer import Agent, Peer, PeerError, Region, RegionDescriptor
from kvxfer.directory import Entry, InProcessDirectory
from kvxfer.peer import session_with
from tests.fault.proxy import Proxy
from tests.waiting import until

BOUND_S = 60.0
CALLERS = 8

Target = str | Entry | RegionDescriptor


def localhost(agent: Agent) -> str:
    return agent.address.replace("127.0.0.1", "localhost")


#: What each caller passes, by the number of the caller.
FORMS: dict[str, Callable[[int, Agent, Region], Target]] = {
    "descriptor": lambda _, there, region: RegionDescriptor.from_bytes(region.descriptor.to_bytes()),
    "entry": lambda _, there, region: Entry.from_bytes(there.entry.to_bytes()),
    "entries spelled differently": lambda number, there, region: Entry(
        "there", localhost(there) if number % 2 else there.address, there.incarnation
    ),
    "name": lambda _, there, region: "there",
    "address": lambda _, there, region: there.address,
    "host's name": lambda _, there, region: localhost(there),
    "address and entry": lambda number, there, region: there.entry if number % 2 else there.address,
}


def cache(value: int) -> Any:
    return np.full((CALLERS, 64), value, np.uint8)


@pytest.fixture
def directory() -> InProcessDirectory:
    return InProcessDirectory()


@pytest.mark.parametrize("how", ["tasks", "threads"])
@pytest.mark.parametrize("form", FORMS)
def test_who_connect_at_once_share_a_session(form: str, how: str, directory: InProcessDirectory) -> None:
    """Some of them leave while they wait, the first among them; those that stay read without a loss."""
    with Agent("here", directory=directory) as here, Agent("there", directory=directory) as there:
        pages = cache(0)
        mine, theirs = here.register("mine", pages), there.register("theirs", cache(7))
        lease = theirs.grant(None, blocks=range(CALLERS), mode="read")
        kept: list[Any] = []

        def target(number: int) -> Target:
            return FORMS[form](number, there, theirs)

        async def connect_and_read(number: int) -> None:
            peer = await here.connect(target(number), BOUND_S)
            kept.append(peer)
            remote = await peer.region("theirs", BOUND_S)
            await here.read(mine, remote, [number], [number], lease=lease.token)

        def connect_and_read_blocking(number: int) -> None:
            peer = here.connect_blocking(target(number), BOUND_S)
            kept.append(peer)
            remote = peer.region_blocking("theirs", BOUND_S)
            here.read(mine, remote, [number], [number], lease=lease.token).wait(BOUND_S)

        async def at_once() -> None:
            callers = [asyncio.ensure_future(connect_and_read(number)) for number in range(CALLERS)]
            await asyncio.sleep(0)
            for leaves in callers[:3]:
                leaves.cancel()
            await asyncio.gather(*callers[3:])

        if how == "tasks":
            asyncio.run(at_once())
        else:
            threads = [threading.Thread(target=connect_and_read_blocking, args=(i,)) for i in range(CALLERS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(BOUND_S)
        first = 3 if how == "tasks" else 0
        assert len(kept) == CALLERS - first
        assert set(kept) == {here.connect_blocking(target(0), BOUND_S)}
        assert (pages[first:] == 7).all()
        assert len(here.peers) == 1
        until(lambda: len(there.peers) == 1)


async def test_callers_that_leave_take_the_session_from_nobody(seed: int) -> None:
    """Each caller is cancelled at any moment, or never; a session is left where one of them got it."""
    draw = random.Random(seed)
    async with Agent("here") as here, Agent("there") as there:
        region = there.register("kv", cache(7))
        num_sessions = 0
        for _ in range(40):
            targets: list[Any] = draw.choices([there.address, there.entry, region.descriptor], k=CALLERS)
            callers = [asyncio.ensure_future(here.connect(target, BOUND_S)) for target in targets]
            for _ in range(draw.randrange(12)):
                await asyncio.sleep(0)
            for caller in draw.sample(callers, draw.randrange(1, CALLERS + 1)):
                caller.cancel()
                for _ in range(draw.randrange(3)):
                    await asyncio.sleep(0)
            found = await asyncio.gather(*callers, return_exceptions=True)
            peers = {peer for peer in found if not isinstance(peer, BaseException)}
            assert all(isinstance(error, asyncio.CancelledError) for error in found if error not in peers)
            assert len(peers) <= 1, seed
            num_sessions += len(peers)
            for peer in peers:
                assert peer.state == "open", (seed, peer.error)
                peer.disconnect()
            await asyncio.to_thread(until, lambda: not here.peers and not there.peers)
    # All callers are cancelled in one round of CALLERS.
    assert num_sessions > 0


async def test_both_ends_use_one_session_if_they_connect_at_once(seed: int) -> None:
    """A lease for the session that one end finds permits what goes over the session that the other finds."""
    draw = random.Random(seed)

    async def dial(agent: Agent, other: Agent, after_s: float) -> Peer:
        await asyncio.sleep(after_s)
        return await agent.connect(other.address, BOUND_S)

    for _ in range(40):
        async with Agent("a") as a, Agent("b") as b:
            regions = {agent: agent.register("kv", cache(1)) for agent in (a, b)}
            delays_s = draw.sample((0.0, draw.random() * 0.002), k=2)
            dialled = await asyncio.gather(dial(a, b, delays_s[0]), dial(b, a, delays_s[1]))
            # What has brought a message is up at both ends.
            for peer, there in zip(dialled, (b, a), strict=True):
                peer.send(b"hello")
                await anext(there.messages())
            for here, there in ((a, b), (b, a)):
                at_here, at_there = session_with(here.peers, there.name), session_with(there.peers, here.name)
                assert at_here is not None, seed
                assert at_there is not None, seed
                assert await here.connect(there.address, BOUND_S) is at_here, seed
                at_here.send(b"by this session")
                assert (await anext(there.messages())).peer is at_there, seed
                lease = regions[there].grant(at_there, blocks=[5], mode="write")
                for remote in (
                    await at_here.region("kv", BOUND_S),
                    RegionDescriptor.from_bytes(regions[there].descriptor.to_bytes()),
                ):
                    await here.write(regions[here], remote, [3], [5], lease=lease.token, timeout_s=BOUND_S)


class LateProxy(Proxy):
    """Takes connections, and forwards none before `opens` is set."""

    def __init__(self, address: str) -> None:
        self.opens = threading.Event()
        super().__init__(address)

    def _accept(self) -> None:
        self.opens.wait(BOUND_S)
        super()._accept()


async def test_a_caller_with_more_time_is_not_bound_by_the_first() -> None:
    async with Agent("here") as here, Agent("there") as there:
        with (proxy := LateProxy(there.address)):
            hurried = asyncio.ensure_future(here.connect(proxy.address, 0.2))
            patient = asyncio.ensure_future(here.connect(proxy.address, BOUND_S))
            with pytest.raises(PeerError, match="no-answer"):
                await hurried
            proxy.opens.set()
            assert (await patient).name == "there"
            patient.result().disconnect()


async def test_who_connects_for_each_request_opens_one_session() -> None:
    async with Agent("here") as here, Agent("there") as there:
        peers = [await here.connect(there.address, BOUND_S) for _ in range(50)]
        assert set(peers) == set(here.peers)
        assert len(there.peers) == 1
        peers[0].disconnect()
        again = await here.connect(there.address, BOUND_S)
        assert again.state == "open"
        assert again is not peers[0]
