"""Groups over real agents: unequal peers, lost ones, and all ways of waiting at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from kvxfer import (
    Agent,
    AgentOptions,
    Group,
    KVLayout,
    KvxferError,
    Peer,
    PeerError,
    Region,
    Transfer,
    TransferError,
    TransferState,
)

BOUND_S = 30.0
NUM_LAYERS, NUM_BLOCKS, NUM_HEADS, NUM_RANKS = 4, 8, 6, 3


@dataclass
class Rank:
    """A prefill rank that holds a third of the heads, and decode's session with it."""

    agent: Agent
    region: Region
    to_decode: Peer
    from_decode: Peer


class Ranks:
    """Decode with all heads, and three prefill ranks with one agent each."""

    def __init__(self, transport: str) -> None:
        options = AgentOptions(transports=(transport,))
        self.decode = Agent("decode", options)
        self.kv = np.zeros((NUM_LAYERS, 2, NUM_BLOCKS, 4, NUM_HEADS, 16), np.uint16)
        self.region = self.decode.register("kv", self.kv, KVLayout.from_tensor(self.kv, "l2bthd"))
        self.prefill = [self._rank(at, options) for at in range(NUM_RANKS)]

    def _rank(self, at: int, options: AgentOptions) -> Rank:
        agent = Agent(f"prefill-{at}", options)
        count = NUM_HEADS // NUM_RANKS
        kv = np.full((NUM_LAYERS, 2, NUM_BLOCKS, 4, count, 16), at + 1, np.uint16)
        layout = KVLayout.from_tensor(kv, "l2bthd", first_head=at * count, total_heads=NUM_HEADS)
        region = agent.register("kv", kv, layout)
        to_decode = agent.connect_blocking(self.decode.address, BOUND_S)
        from_decode = self.decode.accept_blocking(agent.name, BOUND_S)
        for peer in (to_decode, from_decode):
            peer.region_blocking("kv", BOUND_S)
        region.grant(to_decode, None, "read", ttl_s=2 * BOUND_S)
        self.region.grant(from_decode, None, "write", ttl_s=2 * BOUND_S)
        return Rank(agent, region, to_decode, from_decode)

    def read(self, at: int, blocks: list[int]) -> Transfer:
        remote = self.prefill[at].from_decode.regions["kv"]
        return self.decode.read(self.region, remote, blocks, blocks, timeout_s=BOUND_S)

    def held(self, at: int, blocks: list[int]) -> Transfer:
        """A write that starts when it is released."""
        rank = self.prefill[at]
        remote = rank.to_decode.regions["kv"]
        return rank.agent.write(rank.region, remote, blocks, blocks, hold=True, timeout_s=BOUND_S)

    def close(self) -> None:
        for agent in (self.decode, *(rank.agent for rank in self.prefill)):
            agent.close()


@pytest.fixture(params=["shm", "tcp"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks(request.param)
    yield made
    made.close()


def test_what_several_ranks_hold_is_one_wait(ranks: Ranks) -> None:
    group = Group(ranks.read(at, [1, 5]) for at in range(NUM_RANKS))
    for layer in group.layers:
        group.layer_blocking(layer, BOUND_S)
    group.wait(BOUND_S)
    assert (ranks.kv[:, :, [1, 5]] == np.repeat([1, 2, 3], 2)[:, None]).all()
    assert group.stages.ended_ns >= group.stages.first_piece_ns >= group.stages.posted_ns > 0
    assert len(group.rails) == 1


async def test_a_layer_of_all_ranks_is_waited_for_while_they_compute_it(ranks: Ranks) -> None:
    incoming = ranks.decode.expect(b"req", [2, 3], timeout_s=BOUND_S)
    writes = [
        rank.agent.write(rank.region, rank.to_decode.regions["kv"], [2, 3], [2, 3], hold=True, notify=b"req")
        for rank in ranks.prefill
    ]
    sent, received = Group(writes), Group([incoming])
    for layer in received.layers:
        waiting = asyncio.ensure_future(received.layer(layer))
        for write in writes:
            await asyncio.sleep(0)
            assert not waiting.done()
            write.mark_ready(layer + 1)
        await waiting
        assert (ranks.kv[layer][:, [2, 3]] == np.repeat([1, 2, 3], 2)[:, None]).all()
    await sent
    await received


@pytest.mark.parametrize("how", ["await", "blocking", "first failure"])
def test_one_of_three_peers_is_lost(ranks: Ranks, how: str) -> None:
    # The writes belong to three agents of this process; each holds two blocks until it ends.
    group = Group(ranks.held(at, [at, 7]) for at in range(NUM_RANKS))
    reads = Group([ranks.read(0, [1]), ranks.read(2, [3])])
    reads.wait(BOUND_S)
    ranks.prefill[1].to_decode.disconnect()
    if how == "first failure":
        assert isinstance(group.first_failure_blocking(BOUND_S), PeerError)
    elif how == "await":
        with pytest.raises(PeerError):
            asyncio.run(_ended(group))
    with pytest.raises(PeerError, match="1 of 3 transfers failed") as raised:
        group.wait(BOUND_S)
    assert raised.value.peer == "decode"
    # All have ended, before their deadlines.
    assert [work.state for work in group.members] == ["cancelled", "failed", "cancelled"]
    # Other transfers of the same agents are not affected.
    Group([ranks.read(0, [1]), ranks.read(2, [3])]).wait(BOUND_S)


async def _ended(group: Group) -> None:
    await group


def test_cancelled_in_the_middle(ranks: Ranks) -> None:
    writes = [ranks.held(at, [at]) for at in range(NUM_RANKS)]
    group = Group(writes)
    writes[0].mark_ready(NUM_LAYERS)
    writes[0].wait(BOUND_S)
    writes[1].mark_ready(2)
    with pytest.raises(TimeoutError):
        group.wait(0.001)
    group.cancel()
    with pytest.raises(TransferError, match="2 of 3 transfers were cancelled"):
        group.wait(BOUND_S)
    assert [work.state for work in writes] == ["done", "cancelled", "cancelled"]
    # The pages are free: no earlier transfer can write to them.
    for rank in ranks.prefill:
        assert rank.agent.stats()["transfers_open"] == 0


def test_every_waiter_on_any_loop_or_thread_hears_the_same(ranks: Ranks) -> None:
    writes = [ranks.held(at, [at]) for at in range(NUM_RANKS)]
    group = Group(writes, cancel_on_failure=False)
    started = threading.Barrier(7)
    heard: list[str] = []

    def blocking() -> None:
        started.wait()
        group.wait(BOUND_S)

    def on_loop() -> None:
        async def main() -> None:
            waiting = [asyncio.ensure_future(group) for _ in range(2)]
            await asyncio.sleep(0)
            started.wait()
            await asyncio.gather(*waiting)

        asyncio.run(asyncio.wait_for(main(), BOUND_S))

    def run(wait: Callable[[], None]) -> None:
        try:
            wait()
        except KvxferError as error:
            heard.append(error.code)

    threads = [threading.Thread(target=run, args=(each,)) for each in (blocking, on_loop) * 3]
    for thread in threads:
        thread.start()
    started.wait()
    writes[0].mark_ready(NUM_LAYERS)
    writes[2].cancel()
    writes[1].mark_ready(NUM_LAYERS)
    for thread in threads:
        thread.join(BOUND_S)
    assert heard == ["cancelled"] * 6
    assert [work.state for work in writes] == ["done", "done", "cancelled"]


def test_members_that_have_ended_and_a_closed_agent(ranks: Ranks) -> None:
    done, held = ranks.read(0, [1]), [ranks.held(at, [at]) for at in range(NUM_RANKS)]
    done.wait(BOUND_S)
    group = Group([done, *held])
    ranks.prefill[2].agent.close()
    with pytest.raises(KvxferError, match="1 of 4 transfers failed") as raised:
        group.wait(BOUND_S)
    assert raised.value.code == "closed"
    assert group.state is TransferState.FAILED
    Group([done]).wait(0)


def test_many_members_end_while_others_use_the_agent(ranks: Ranks) -> None:
    works = [ranks.read(at % NUM_RANKS, [at % NUM_BLOCKS]) for at in range(300)]
    other = threading.Thread(target=lambda: Group(works[::7]).wait(BOUND_S))
    other.start()
    Group([Group(works[:100]), Group(works[100:])]).wait(BOUND_S)
    other.join(BOUND_S)
    assert all(work.succeeded for work in works)
