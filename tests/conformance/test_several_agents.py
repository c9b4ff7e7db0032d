"""Several agents in one process: what belongs to one is refused by every verb of another."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

from kvxfer import Agent, LeaseToken, RegionDescriptor
from kvxfer.errors import UsageError

TIMEOUT_S = 30.0


class Decode:
    """An agent with a cache, and a session with each of two prefills that hold other bytes."""

    def __init__(self, name: str, prefills: list[Agent]) -> None:
        self.agent = Agent(name)
        self.array = np.zeros((16, 64), np.uint8)
        self.region = self.agent.register("kv", self.array)
        self.peers = [self.agent.connect_blocking(each.address, TIMEOUT_S) for each in prefills]
        self.remotes = [peer.region_blocking("kv", TIMEOUT_S) for peer in self.peers]
        self.trigger = self.agent.trigger()
        self.ring = self.agent.command_ring(8)
        self.prepared = self.ring.prepare_write(self.region, self.remotes[0], [1], [2])


class Process:
    """Two decodes and two prefills, whose regions, peers, leases and commands have the same numbers."""

    def __init__(self) -> None:
        self.prefills = [Agent(f"prefill-{at}") for at in range(2)]
        self.sources = [np.full((16, 64), at + 1, np.uint8) for at in range(2)]
        self.regions = [
            agent.register("kv", source) for agent, source in zip(self.prefills, self.sources, strict=True)
        ]
        self.mine, self.other = Decode("mine", self.prefills), Decode("other", self.prefills[::-1])
        for at, region in enumerate(self.regions):
            for name in ("mine", "other"):
                peer = self.prefills[at].accept_blocking(name, TIMEOUT_S)
                region.grant(peer, ttl_s=600)
                region.grant(peer, mode="write", ttl_s=600)
        self.token = self.regions[1].grant("mine", ttl_s=600).token

    @property
    def agents(self) -> list[Agent]:
        return [self.mine.agent, self.other.agent, *self.prefills]

    def state(self) -> list[tuple[int, int, int]]:
        while any(agent.stats()["transfers_open"] for agent in self.agents):  # of the source, as yet unaware
            for agent in self.agents:
                agent.poll()
        return [
            (stats["transfers_open"], stats["transfers_done"], stats["transfers_failed"])
            for stats in (agent.stats() for agent in self.agents)
        ]

    def close(self) -> None:
        for agent in self.agents:
            agent.close()


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    found = Process()
    yield found
    found.close()


# Verbs of `mine`, each called with an object of `other`.
Verb = Callable[[Process, Decode, Decode], Any]
VERBS: dict[str, Verb] = {
    f"{verb}({what})": call
    for verb in ("write", "read")
    for what, call in {
        "region": lambda p, m, o, v=verb: getattr(m.agent, v)(o.region, m.remotes[0], [1], [2]),
        "remote_region": lambda p, m, o, v=verb: getattr(m.agent, v)(m.region, o.remotes[0], [1], [2]),
        "layers": lambda p, m, o, v=verb: getattr(m.agent, v)(
            m.region, o.remotes[0], [1], [2], layers=range(1)
        ),
        "after=trigger": lambda p, m, o, v=verb: getattr(m.agent, v)(
            m.region, m.remotes[0], [1], [2], after=o.trigger
        ),
        "after=at": lambda p, m, o, v=verb: getattr(m.agent, v)(
            m.region, m.remotes[0], [1], [2], after=o.trigger.at(2)
        ),
        "after=by_layer": lambda p, m, o, v=verb: getattr(m.agent, v)(
            m.region, m.remotes[0], [1], [2], after=o.trigger.by_layer()
        ),
    }.items()
} | {
    "expect(region)": lambda p, m, o: m.agent.expect(b"tag", [1], o.region),
    "expect(peer)": lambda p, m, o: m.agent.expect(b"tag", [1], peer=o.peers[0]),
    "grant(holder)": lambda p, m, o: m.region.grant(o.peers[0], [1]),
    "prepare_write(region)": lambda p, m, o: m.ring.prepare_write(o.region, m.remotes[0], [1], [2]),
    "prepare_write(remote_region)": lambda p, m, o: m.ring.prepare_write(m.region, o.remotes[0], [1], [2]),
    "start(prepared)": lambda p, m, o: m.ring.start(o.prepared, 0),
}
# Calls with tokens of prefill-1 that read from, or are granted by, prefill-0.
TOKENS: dict[str, Verb] = {
    "write(lease)": lambda p, m, o: m.agent.write(m.region, m.remotes[0], [1], [2], lease=p.token),
    "read(lease)": lambda p, m, o: m.agent.read(m.region, m.remotes[0], [1], [2], lease=p.token),
    "prepare_write(lease)": lambda p, m, o: m.ring.prepare_write(
        m.region, m.remotes[0], [1], [2], lease=p.token
    ),
    "grant(token)": lambda p, m, o: p.regions[0].grant(None, [1], token=p.token),
}


@pytest.mark.parametrize("name", [*VERBS, *TOKENS])
def test_what_is_another_agents_is_refused_and_moves_nothing(process: Process, name: str) -> None:
    mine, other = process.mine, process.other
    # What a verb knows of its last call is of no help to the next.
    mine.agent.read(mine.region, mine.remotes[0], [1], [2]).wait(TIMEOUT_S)
    before, arrays = process.state(), [mine.array.copy(), other.array.copy()]
    with pytest.raises(UsageError) as caught:
        {**VERBS, **TOKENS}[name](process, mine, other)
    assert caught.value.code == "invalid-argument"
    for agent in ("mine", "other") if name in VERBS else ("prefill-0", "prefill-1"):
        assert f"agent '{agent}'" in str(caught.value)
    assert process.state() == before
    for array, was in zip((mine.array, other.array), arrays, strict=True):
        np.testing.assert_array_equal(array, was)


def test_agents_of_one_name_are_told_apart(process: Process) -> None:
    with Agent("mine") as twin:
        region = twin.register("kv", np.zeros((16, 64), np.uint8))
        with pytest.raises(UsageError) as caught:
            process.mine.agent.write(region, process.mine.remotes[0], [1], [2])
        for agent in (twin, process.mine.agent):
            assert agent.incarnation.hex()[:8] in str(caught.value)


TRAVELS: dict[str, Callable[[RegionDescriptor], RegionDescriptor]] = {
    "bytes": lambda remote: RegionDescriptor.from_bytes(remote.to_bytes()),
    "pickle": lambda remote: pickle.loads(pickle.dumps(remote)),  # noqa: S301
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("way", TRAVELS)
def test_a_descriptor_that_travelled_is_its_owners_for_every_agent(process: Process, way: str) -> None:
    mine, other = process.mine, process.other
    for at in range(2):
        told = TRAVELS[way](other.remotes[at])
        assert told == other.remotes[at]
        assert "peer" not in repr(told)
        for _ in range(2):
            mine.array[...] = 0
            mine.agent.read(mine.region, told, [3], [4]).wait(TIMEOUT_S)
            # The other agent connected in another order: its session 0 is prefill-1.
            np.testing.assert_array_equal(mine.array[4], process.sources[1 - at][3])


def test_a_command_is_of_the_ring_that_it_was_prepared_in(process: Process) -> None:
    mine = process.mine
    another = mine.agent.command_ring(8)
    another.prepare_write(mine.region, mine.remotes[0], [5], [6])
    with pytest.raises(UsageError, match="to another ring"):
        another.start(mine.prepared, 0)
    assert another.num_taken == 0


def test_a_drawn_token_is_of_no_agent_until_it_is_granted(process: Process) -> None:
    """An engine's scheduler passes one token to all ranks."""
    token, mine = LeaseToken.draw(), process.mine
    for at in range(2):
        granted = process.regions[at].grant("mine", [7], token=token)
        assert granted.token != token
        assert granted.token.agent == f"prefill-{at}"
        for named in (token, granted.token):
            mine.array[...] = 0
            mine.agent.read(mine.region, mine.remotes[at], [7], [7], lease=named).wait(TIMEOUT_S)
            np.testing.assert_array_equal(mine.array[7], process.sources[at][7])
        with pytest.raises(UsageError, match="already granted"):
            process.regions[at].grant("mine", [7], token=token)
        granted.revoke_blocking()
