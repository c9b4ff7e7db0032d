"""Blocks that a prefill worker keeps: the engine gets them back when no peer may read them any longer.

Real leases of a real agent; what vLLM's own types would bring here are their attributes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

from kvxfer import Agent, AgentOptions, KVLayout, Lease, LeaseToken
from kvxfer.connectors.common.kept_blocks import KeptBlocks
from kvxfer.connectors.common.notes import Heartbeat, Receipt, digest_of
from kvxfer.connectors.common.step import Grant, News

REQUEST = "request-1"
TOKENS = LeaseToken.draw(), LeaseToken.draw()
CLAIM = Heartbeat(digest_of(REQUEST), digest_of(str(TOKENS[0])), is_reading=False)
#: Two readers; the second one ends last.
RECEIPTS = [Receipt(digest_of(REQUEST), digest_of(str(TOKENS[0])), reader, 2) for reader in range(2)]


class Keeper:
    """Blocks of two cache groups in a real agent's region, granted for one request."""

    def __init__(self, agent: Agent, ttl_s: float = 60.0, *readers: str) -> None:
        array = np.zeros((4, 2, 16, 4, 2, 8), np.float16)
        region = agent.register("kv", array, KVLayout.from_tensor(array, "l2bthd"))
        self.leases: list[Lease] = []

        def grant(*terms: Any, **named: Any) -> Lease:
            self.leases.append(region.grant(*terms, **named))
            return self.leases[-1]

        groups = [SimpleNamespace(table=at, lease=lambda drawn: drawn) for at in range(2)]
        granting = SimpleNamespace(grant=grant, layout=SimpleNamespace(null_block=0))
        regions: Any = SimpleNamespace(groups=groups, pages_per_block=[1, 1], regions=[granting] * 2)
        wanted = Grant(REQUEST, TOKENS, ((1, 2), (3, 0)), readers)
        self.counted: list[str] = []
        counts: Any = SimpleNamespace(
            received=lambda: self.counted.append("received"),
            expired=lambda: self.counted.append("expired"),
            gave_way=lambda: self.counted.append("gave way"),
        )
        self.blocks = KeptBlocks(ttl_s, ttl_s, counts)
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
    keeper.blocks.note(RECEIPTS[0], "decode/0.1")
    assert keeper.blocks.collect(set()) == set()
    assert keeper.states == ["active", "active"]
    keeper.blocks.note(RECEIPTS[1], "decode/1.2")
    assert keeper.blocks.collect(set()) == {REQUEST}
    assert keeper.states == ["revoked", "revoked"], "somebody may still read what the engine uses again"
    assert keeper.blocks.collect({REQUEST}) == set()


@pytest.mark.parametrize("others", [(), ("decode-2",)])
@pytest.mark.parametrize(
    "claim",
    [replace(CLAIM, first_lease=bytes(16)), replace(CLAIM, request=bytes(16)), CLAIM],
    ids=["another lease", "another request", "another engine"],
)
def test_strangers_claim_nothing(agent: Agent, claim: Heartbeat, others: tuple[str, ...]) -> None:
    keeper = Keeper(agent, 1e-6, "decode", *others)
    keeper.blocks.claim(claim, "decoder/0.1")
    assert keeper.blocks.take_news() == News()
    assert keeper.blocks.collect({REQUEST}) == {REQUEST}


@pytest.mark.parametrize(
    ("named", "told", "becomes"),
    [
        ("", "a read", "free"),
        ("", "b claim, a read", "kept"),
        ("", "b claim, a read, b read", "free"),
        ("", "a claim, b claim, b read, a read", "free"),
        ("", "a shared", "may go"),
        ("", "a shared, later", "free"),
        ("", "a shared, b claim", "kept"),
        ("", "a shared, b claim, later", "free in vain"),
        ("", "a shared, b claim, b shared", "may go"),
        ("", "a shared, b claim, b read", "free"),
        ("", "a shared, b shared, a claim", "may go"),
        ("ab", "a read", "kept"),
        ("ab", "a read, c read", "kept"),
        ("ab", "b read, a read", "free"),
        ("ab", "b shared, a shared", "free"),
    ],
)
def test_blocks_stay_until_every_engine_that_was_heard_of_has_read(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, named: str, told: str, becomes: str
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    keeper = Keeper(agent, 30.0, *named)
    assert keeper.blocks.collect({REQUEST}) == set()
    for each in told.split(", "):
        engine, _, what = each.partition(" ")
        if engine == "later":
            now += 30.0
        elif what == "claim":
            keeper.blocks.claim(CLAIM, f"{engine}/0.1")
        else:
            receipt = Receipt(CLAIM.request, CLAIM.first_lease, 0, 1, may_be_shared=what == "shared")
            keeper.blocks.note(receipt, f"{engine}/0.1")
    # More readers may come, and the engine may take the blocks back if it needs them.
    assert becomes.startswith("free") or keeper.blocks.take_news().read == (
        (REQUEST,) * (becomes == "may go")
    )
    assert keeper.blocks.collect(set()) == ({REQUEST} if becomes.startswith("free") else set())
    assert ("expired" in keeper.counted) == (becomes == "free in vain")
    if becomes == "may go":
        keeper.blocks.give_way(REQUEST)
        assert keeper.blocks.collect(set()) == {REQUEST}
        assert "gave way" not in keeper.counted


@pytest.mark.parametrize("ending", ["withdraw", "let_go", "close"])
def test_what_takes_blocks_back_early_ends_every_right(agent: Agent, ending: str) -> None:
    keeper = Keeper(agent)
    getattr(keeper.blocks, ending)(*((REQUEST,) if ending == "withdraw" else ()))
    assert keeper.states == ["revoked", "revoked"]
    # The engine gets back only the blocks that it has not got yet.
    assert keeper.blocks.collect({REQUEST}) == ({REQUEST} if ending == "let_go" else set())
