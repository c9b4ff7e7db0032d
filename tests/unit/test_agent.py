"""agent: verbs check, translate and pass on their arguments; a program is compiled only once."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from tests.waiting import until_on_loop

pytest.importorskip("kvxfer._native", reason="the native module is not built")

from kvxfer import (
    KVLayout,
    LeaseState,
    PeerState,
    RegionDescriptor,
)
from kvxfer._native import CODES, NativeError
from kvxfer.agent import Agent
from kvxfer.errors import AgentError, PeerError, UsageError, class_of

SHAPE = (4, 2, 16, 4, 2, 8)


class Ends:
    """An agent over a fake core, with a region, and a peer with the same one."""

    def __init__(self, cores: list[Any]) -> None:
        self.agent = Agent("prefill")
        self.core = cores[-1]
        self.array = np.zeros(SHAPE, np.float16)
        self.layout = KVLayout.from_tensor(self.array, "l2bthd")
        self.region = self.agent.register("kv", self.array, self.layout)
        self.core.add_peer(1, "decode")
        self.core.regions_of[1] = [self.told(70, self.layout)]
        self.peer = self.agent.accept_blocking("decode", 0)
        self.remote = self.peer.regions["kv"]

    def told(self, number: int, layout: KVLayout, path: str = "shm") -> dict[str, Any]:
        return {
            "id": number,
            "name": "kv",
            "base": 0,
            "nbytes": layout.nbytes,
            "num_blocks": layout.num_blocks,
            "layout": layout.to_bytes(),
            "path": path,
            "notes": [],
        }

    def post(self) -> tuple[Any, ...]:
        found: tuple[Any, ...] = self.core.called("post")[-1]
        return found

    def held(self) -> bool:
        return bool(self.post()[-1])


@pytest.fixture
def ends(fake_core: list[Any]) -> Ends:
    return Ends(fake_core)


# ---- regions ------------------------------------------------------------------------------------


def test_a_name_is_one_regions_at_a_time(ends: Ends) -> None:
    with pytest.raises(UsageError, match="region 'kv' is registered already"):
        ends.agent.register("kv", ends.array, ends.layout)
    assert ends.agent.regions["kv"] is ends.region
    ends.region.deregister_blocking()
    again = ends.agent.register("kv", ends.array, ends.layout)
    assert ends.agent.regions["kv"] is again


def test_register_of_rows_needs_no_layout(ends: Ends) -> None:
    region = ends.agent.register("rows", np.zeros((5, 96), np.uint8))
    assert (region.num_blocks, region.layout.page_nbytes) == (5, 96)
    with pytest.raises(UsageError, match="layout can be left out"):
        ends.agent.register("cube", np.zeros((5, 9, 6), np.uint8))


def test_a_tensor_that_cannot_be_registered_is_named(ends: Ends) -> None:
    fixed = np.zeros(SHAPE, np.float16)
    fixed.flags.writeable = False
    with pytest.raises(UsageError, match=r"^region 'one': this memory is read-only"):
        ends.agent.register("one", fixed, ends.layout)
    with pytest.raises(UsageError, match=r"^tensor 1 of region 'two': this memory is read-only"):
        ends.agent.register("two", [ends.array, fixed], ends.layout)
    assert list(ends.agent.regions) == ["kv"]


def test_a_block_that_is_too_large_is_refused_with_its_region_and_the_limit(ends: Ends) -> None:
    huge = np.empty((1, 1, (1 << 30) + 1), np.uint8)  # never touched, so it takes no memory
    with pytest.raises(UsageError, match=r"region 'huge'.*1073741825 bytes.*limit is 1073741824") as caught:
        ends.agent.register("huge", huge, KVLayout.from_tensor(huge, "lbd"))
    assert caught.value.code == "invalid-argument"
    assert "huge" not in ends.agent.regions


def test_a_region_is_kept_while_a_device_copies_there(ends: Ends) -> None:
    ends.core.is_copying = True
    with pytest.raises(TimeoutError, match="do not free its memory until"):
        ends.region.deregister_blocking(timeout_s=2)
    assert ends.agent.regions == {"kv": ends.region}
    ends.core.is_copying = False
    ends.region.deregister_blocking()
    assert ends.core.called("deregister") == [(1, 2), (1, -1.0)]
    assert not ends.agent.regions


def of_agent(descriptor: RegionDescriptor, name: str) -> RegionDescriptor:
    """Returns the same region of another agent, as a router would pass it on."""
    ours, theirs = (each.encode().ljust(16).hex().encode() for each in (descriptor.agent, name))
    return RegionDescriptor.from_bytes(descriptor.to_bytes().replace(ours, theirs))


def test_a_descriptor_from_elsewhere_finds_the_session_that_connect_gives(ends: Ends) -> None:
    peers = ends.agent._peers
    told = of_agent(ends.remote, "new")
    for number in (2, 3):
        ends.core.add_peer(number, "new")
        assert peers.owner_of(told).id == 2
    ends.core.happen("peer-up", peer=3)
    ends.agent._completions.drain()
    assert peers.owner_of(told) is peers.first_with(told.incarnation, "") is peers.get(2)
    ends.core.known[2]["state"] = "lost"
    assert peers.owner_of(told).id == 3
    ends.core.happen("peer-lost", peer=2)
    ends.agent._completions.drain()
    assert peers.owner_of(told).id == 3
    ends.core.known[3]["state"] = "lost"
    with pytest.raises(PeerError, match="connect to it first"):
        peers.owner_of(told)


def test_a_peers_unreadable_layout_is_its_fault(ends: Ends) -> None:
    ends.core.regions_of[1] = [{**ends.told(71, ends.layout), "layout": b"{}"}]
    with pytest.raises(PeerError, match="cannot be read"):
        _ = ends.peer.regions


# ---- transfers ----------------------------------------------------------------------------------


def test_a_program_is_compiled_once(ends: Ends) -> None:
    for _ in range(3):
        ends.agent.write(ends.region, ends.remote, [7, 9], [3, 4])
    assert len(ends.core.called("install_program")) == 1
    assert len(ends.core.called("post")) == 3


def test_a_peers_region_that_is_gone_is_named(ends: Ends) -> None:
    def gone(*_: object) -> int:
        raise NativeError(CODES["unknown-region"], 'peer "decode" has no region 70 (any more)')

    ends.core.install_program = gone
    with pytest.raises(
        UsageError, match=r"no region 70 .* and 'kv' \(id 70\) of decode: .* take it from peer\.regions"
    ):
        ends.agent.write(ends.region, ends.remote, [1], [2])


def test_expect_finds_the_only_region(ends: Ends) -> None:
    ends.agent.expect(b"req", [3, 4])
    assert ends.core.called("expect")[0][1] == 1
    ends.agent.register("other", np.zeros((2, 2), np.uint8))
    with pytest.raises(UsageError, match="name one with"):
        ends.agent.expect(b"req", [3])
    with pytest.raises(UsageError, match="at least one byte"):
        ends.agent.expect(b"", [3], ends.region)


# ---- leases -------------------------------------------------------------------------------------


def test_a_lease_under_which_a_device_copies_has_not_ended(ends: Ends) -> None:
    lease = ends.region.grant(ends.peer, [7, 9], "write")
    ends.core.is_copying = True
    with pytest.raises(TimeoutError, match="do not use its blocks until it has ended"):
        lease.revoke_blocking(timeout_s=0)
    assert ends.core.called("revoke") == [(9, 0.0)]
    assert not lease.active
    assert lease.state is LeaseState.ENDING
    with pytest.raises(TimeoutError):
        lease.ended_blocking(0)
    ends.core.is_copying = False
    lease.revoke_blocking()
    assert lease.ended_blocking(0) == "revoked"


async def test_revoke_ends_the_right_when_called_and_is_awaited_for_the_fence(ends: Ends) -> None:
    lease = ends.region.grant(ends.peer, [7, 9], "write")
    ends.core.is_copying = True
    fence = lease.revoke()
    assert lease.state is LeaseState.ENDING
    with pytest.raises(TimeoutError, match="do not use its blocks until it has ended"):
        await lease.revoke(timeout_s=0)
    waiting = asyncio.create_task(fence)
    await asyncio.sleep(0)
    assert not waiting.done()
    ends.core.lease_states[9] = "revoked"
    ends.core.happen("lease-ended", lease=9)
    await waiting
    ends.core.is_copying = False
    async with ends.region.grant(ends.peer, [7], "write") as another:
        assert another.active
    assert await another.ended() == "revoked"


def test_a_peer_that_native_code_has_forgotten_stays_lost(ends: Ends, fake_core: list[Any]) -> None:
    def forgotten(number: int) -> dict[str, Any]:
        raise NativeError(CODES["peer-lost"], f"there is no peer {number} (any more)")

    ends.core.add_peer(2, "other")
    never_looked_at = ends.agent.accept_blocking("other", 0)
    told = {"code": CODES["peer-silent"], "message": "nothing was heard of it", "rails": []}
    ends.core.add_peer(1, "decode", "lost")
    ends.core.known[1] |= told
    ends.core.happen("peer-lost", peer=1, code=told["code"])
    ends.agent._completions.drain()
    ends.core.peer = forgotten
    for peer, code in ((ends.peer, "peer-silent"), (never_looked_at, "peer-lost")):
        assert (peer.state, peer.rails, peer.notes) == ("lost", (), ())
        assert peer.error is not None
        assert peer.error.code == code


@pytest.mark.parametrize(
    "code", ["peer-lost", "peer-silent", "peer-restarted", "auth-failed", "protocol", "unreachable", "closed"]
)
def test_a_loss_is_the_same_error_for_who_connects_and_for_who_asks_the_peer(ends: Ends, code: str) -> None:
    ends.core.known[1] |= {"state": "lost", "code": CODES[code], "message": "it went"}
    with pytest.raises(class_of(CODES[code]), match="it went") as caught:
        ends.agent._peers.opened(1, "decode", "")
    assert ends.peer.error is not None
    assert type(ends.peer.error) is type(caught.value)
    assert str(ends.peer.error) == str(caught.value)


def test_a_loss_that_is_read_while_the_agent_ends_disturbs_nobody(ends: Ends) -> None:
    # Another thread drains between this and what follows it in close().
    ends.agent._completions.shut(AgentError("agent 'prefill' is closed", code="closed"))
    ends.core.happen("peer-lost", peer=1, code=CODES["peer-silent"])
    assert ends.agent._completions.drain()
    assert ends.peer.state is PeerState.LOST


def test_a_lease_that_native_code_has_forgotten_has_ended(ends: Ends) -> None:
    def forgotten(number: int) -> str:
        raise NativeError(CODES["invalid-argument"], f"there is no lease {number} (any more)")

    seen = ends.region.grant(ends.peer, [1])
    seen.revoke_blocking()
    assert seen.state is LeaseState.REVOKED
    unseen = ends.region.grant(ends.peer, [1])
    ends.core.lease_state = forgotten
    assert (seen.state, unseen.state) == ("revoked", "ended")
    assert not unseen.active
    assert unseen.ended_blocking(0) == "ended"


def test_heartbeats_renew_a_lease_of_a_peer_alone(ends: Ends) -> None:
    with pytest.raises(UsageError, match="no heartbeats that renew it"):
        ends.region.grant(None, renewable=True)
    for holder, renewable in ((None, False), (ends.peer, False), (ends.peer, True)):
        ends.region.grant(holder, renewable=renewable)
    ends.region.grant(None)
    ends.region.grant(ends.peer)
    assert [told.renewable for told in ends.core.called("grant")] == [False, False, True, False, True]


# ---- the end ------------------------------------------------------------------------------------


async def test_a_close_goes_on_when_who_waits_for_it_is_cancelled(ends: Ends) -> None:
    begun, may_end = threading.Event(), threading.Event()
    close = ends.core.close

    def slow(timeout_s: float) -> None:
        begun.set()
        may_end.wait(60)
        close(timeout_s)

    ends.core.close = slow
    closing = asyncio.create_task(ends.agent.aclose())
    await asyncio.to_thread(begun.wait, 60)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    assert closing.cancelled()
    assert not ends.agent.closed
    may_end.set()
    await until_on_loop(lambda: ends.agent.closed)
