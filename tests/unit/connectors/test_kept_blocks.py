"""Blocks that a prefill worker keeps: the engine has them back when nobody may read them any more.

Real leases of a real agent; what vLLM's own types would bring here are their attributes.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

from kvxfer import Agent, AgentOptions, KVLayout, Lease, LeaseToken
from kvxfer.connectors.common.kept_blocks import KeptBlocks
from kvxfer.connectors.common.notes import Receipt, digest_of

REQUEST = "request-1"
TOKENS = LeaseToken.draw(), LeaseToken.draw()
#: Two readers, of which the second comes last.
RECEIPTS = [Receipt(digest_of(REQUEST), digest_of(str(TOKENS[0])), reader, 2) for reader in range(2)]


class Keeper:
    """Blocks of two cache groups in a real agent's region, granted for one request."""

    def __init__(self, agent: Agent, ttl_s: float = 60.0) -> None:
        array = np.zeros((4, 2, 16, 4, 2, 8), np.float16)
        region = agent.register("kv", array, KVLayout.from_tensor(array, "l2bthd"))
        self.leases: list[Lease] = []

        def grant(*terms: Any, **named: Any) -> Lease:
            self.leases.append(region.grant(*terms, **named))
            return self.leases[-1]

        groups = [SimpleNamespace(table=at, lease=lambda drawn: drawn) for at in range(2)]
        regions: Any = SimpleNamespace(
            groups=groups, pages_per_block=[1, 1], regions=[SimpleNamespace(grant=grant)] * 2
        )
        wanted: Any = SimpleNamespace(request_id=REQUEST, leases=TOKENS, tables=((1, 2), (3, 0)), holder=None)
        self.counted: list[str] = []
        counts: Any = SimpleNamespace(
            received=lambda: self.counted.append("received"), expired=lambda: self.counted.append("expired")
        )
        self.blocks = KeptBlocks(ttl_s, counts)
        self.blocks.grant(wanted, regions)

    @property
    def states(self) -> list[str]:
        return [str(lease.state) for lease in self.leases]


@pytest.fixture
def agent() -> Iterator[Agent]:
    with Agent("prefill", options=AgentOptions(transports=("loopback",))) as agent:
        yield agent


def test_blocks_come_back_once_when_all_have_read_and_the_request_is_over(agent: Agent) -> None:
    keeper = Keeper(agent)
    assert keeper.blocks.collect({REQUEST}) == set()
    keeper.blocks.note(RECEIPTS[0])
    assert keeper.blocks.collect(set()) == set()
    assert keeper.states == ["active", "active"]
    keeper.blocks.note(RECEIPTS[1])
    assert keeper.blocks.collect(set()) == {REQUEST}
    assert keeper.states == ["revoked", "revoked"], "somebody may still read what the engine uses again"
    assert keeper.blocks.collect({REQUEST}) == set()


def test_blocks_of_a_request_that_goes_on_stay(agent: Agent) -> None:
    keeper = Keeper(agent)
    for receipt in RECEIPTS:
        keeper.blocks.note(receipt)
    assert keeper.blocks.collect({"another"}) == set()
    assert keeper.states == ["active", "active"]
    assert keeper.blocks.collect({REQUEST}) == {REQUEST}


def test_readers_that_do_not_come_keep_blocks_for_their_time(agent: Agent) -> None:
    keeper = Keeper(agent, ttl_s=1e-6)
    assert keeper.blocks.collect({REQUEST}) == {REQUEST}
    assert not set(keeper.states) & {"active", "ending"}
    assert keeper.counted == ["expired"]


@pytest.mark.parametrize("ending", ["withdraw", "let_go", "close"])
def test_what_takes_blocks_back_early_ends_every_right(agent: Agent, ending: str) -> None:
    keeper = Keeper(agent)
    getattr(keeper.blocks, ending)(*((REQUEST,) if ending == "withdraw" else ()))
    assert keeper.states == ["revoked", "revoked"]
    # The engine is owed those alone that are still due to it.
    assert keeper.blocks.collect({REQUEST}) == ({REQUEST} if ending == "let_go" else set())
