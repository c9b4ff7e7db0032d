"""group: one end for several transfers, all kinds of waiters, and an error that names blocks and peers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

from kvxfer.agent import Agent
from kvxfer.errors import AgentError, KvxferError, PeerError, TransferError, UsageError
from kvxfer.group import Group
from kvxfer.handle import TransferState
from kvxfer.transfer import Scope, Transfer

LEASE_ENDED, CANCELLED, DEADLINE, SILENT = 31, 33, 34, 71


class Named:
    """As much of a region as a group looks at."""

    def __init__(self, name: str) -> None:
        self.name = name


class Members:
    """Handles of one agent whose states the test sets; handle i moves from prefill-i."""

    def __init__(self, fake_core: list[Any]) -> None:
        self.agent = Agent(f"decode-{len(fake_core)}")
        self.core = fake_core[-1]
        self.region: Any = Named("kv")
        self.handles: list[Any] = []

    def add(self, layers: range = range(2), region: Any = None, arrives: bool = True) -> Transfer:
        handle = self.core.made("expect", ())
        name = f"prefill-{len(self.handles)}"
        self.handles.append(handle)
        scope = Scope(self.agent._completions, name, layers, 0, arrives, region or self.region)
        return Transfer(handle, scope)


@pytest.fixture
def members(fake_core: list[Any]) -> Members:
    return Members(fake_core)


async def turns() -> None:
    """Lets the woken tasks run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_of_none_it_is_done(members: Members) -> None:
    group = Group([])
    await group
    group.wait(0)
    assert group.succeeded
    assert await group.first_failure() is None
    assert group.failed_blocks.tolist() == []
    assert list(group.layers) == []
    group.cancel()
    with pytest.raises(UsageError, match="no transfer of <Group of 0 done> moves layer 0"):
        group.layer_arrived(0)


async def test_one_failure_ends_all_and_is_raised_when_all_have_ended(members: Members) -> None:
    group = Group(members.add() for _ in range(3))
    waiting = asyncio.ensure_future(group)
    await turns()
    members.handles[1].end("failed", LEASE_ENDED, "the lease was revoked", failed=(4, 3))
    await turns()
    assert [handle.cancelled for handle in members.handles] == [True, False, True]
    assert not waiting.done()
    assert isinstance(group.error, TransferError)
    assert group.state == "pending"
    for at in (0, 2):
        members.handles[at].end("cancelled", CANCELLED, "cancelled by the caller", failed=(5, 4))
    with pytest.raises(
        TransferError, match=r"^1 of 3 .* failed: transfer 2: the lease was revoked; 2 cancelled \["
    ):
        await waiting
    assert group.state == "failed"
    error = group.error
    assert error is not None
    assert (error.code, error.peer, error.failed_blocks.tolist()) == ("lease-ended", "prefill-1", [3, 4, 5])
    assert [work.error is not None for work in group.members] == [True] * 3


async def test_what_had_failed_before_anybody_waited_ends_the_others_too(members: Members) -> None:
    group = Group(members.add() for _ in range(2))
    members.handles[0].end("failed", DEADLINE, "deadline")
    assert not members.handles[1].cancelled
    waiting = asyncio.ensure_future(group)
    await turns()
    assert members.handles[1].cancelled
    members.handles[1].end()  # it was faster
    with pytest.raises(TransferError, match="1 of 2"):
        await waiting


@pytest.mark.parametrize(
    ("codes", "cls", "code", "peer"),
    [
        ((LEASE_ENDED, SILENT, DEADLINE), PeerError, "peer-silent", "prefill-1"),
        ((DEADLINE, LEASE_ENDED), TransferError, "deadline", "prefill-0"),
        ((90, SILENT), AgentError, "closed", "prefill-0"),
        ((15, 50), KvxferError, "rail-failed", "prefill-1"),
    ],
)
def test_the_largest_loss_names_the_error(
    members: Members, codes: tuple[int, ...], cls: type[KvxferError], code: str, peer: str
) -> None:
    group = Group(members.add() for _ in codes)
    for at, (handle, each) in enumerate(zip(members.handles, codes, strict=True)):
        handle.end("failed", each, f"reason {at}", failed=(at,))
    error = group.error
    assert isinstance(error, cls)
    assert (error.code, error.peer) == (code, peer)
    assert error.failed_blocks.tolist() == list(range(len(codes)))
    for at in range(len(codes)):
        assert f"reason {at}" in str(error)
        assert f"peer prefill-{at}" in str(error)


def test_a_thousand_failures_have_a_short_message(members: Members) -> None:
    group = Group(members.add() for _ in range(1000))
    for handle in members.handles:
        handle.end("failed", DEADLINE, "deadline")
    assert len(group.errors) == 1000
    assert "and 996 more" in str(group.error)
    assert len(str(group.error)) < 500


def test_blocks_of_several_regions_are_told_for_each(members: Members) -> None:
    other: Any = Named("states")
    group = Group([members.add(), members.add(region=other), members.add()])
    for at, handle in enumerate(members.handles):
        handle.end("failed", DEADLINE, "deadline", failed=(7, at))
    assert group.failed_blocks_of(members.region).tolist() == [0, 2, 7]
    assert group.failed_blocks_of(other).tolist() == [1, 7]
    with pytest.raises(UsageError, match="'kv', 'states'"):
        group.failed_blocks  # noqa: B018
    error = group.error
    assert error is not None
    assert "2 of region 'states', 3 of region 'kv'" in str(error)
    assert not len(error.failed_blocks)


async def test_a_layer_is_in_place_when_all_that_have_it_say_so(members: Members) -> None:
    group = Group([members.add(range(2)), members.add(range(1, 4)), members.add(range(3, 4))])
    assert group.layers == range(4)
    waiting = {layer: asyncio.ensure_future(group.layer(layer)) for layer in group.layers}
    await turns()
    first, second, third = members.handles
    for handle, layer in ((first, 1), (second, 3), (first, 0), (second, 1), (third, 3)):
        assert not group.layer_arrived(layer)
        handle.arrive(layer)
        await turns()
    assert [task.done() for task in waiting.values()] == [True, True, False, True]
    group.layer_blocking(1, 0)
    with pytest.raises(TimeoutError):
        group.layer_blocking(2, 0)
    second.end("failed", DEADLINE, "deadline", failed=(3,))
    with pytest.raises(TransferError):
        await waiting[2]
    with pytest.raises(TransferError):
        group.layer_blocking(2, 0)
    await group.layer(1)
    assert third.cancelled
    with pytest.raises(UsageError, match=r"moves layer 4: they move layers within range\(0, 4\)"):
        await group.layer(4)


async def test_a_cancelled_await_leaves_the_members(members: Members) -> None:
    group = Group(members.add() for _ in range(3))
    for wait in (lambda: group._ended(), lambda: group.layer(1), group.first_failure):
        waiting = asyncio.ensure_future(wait())
        await turns()
        assert members.agent._completions._waiters
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not members.agent._completions._waiters
    assert not any(handle.cancelled for handle in members.handles)
    assert group.state is TransferState.PENDING


def test_groups_stand_for_their_members_and_each_counts_once(members: Members) -> None:
    works = [members.add() for _ in range(3)]
    group = Group([works[0], Group(works[:2]), works[2], works[0]])
    assert group.members == tuple(works)
    assert repr(group) == "<Group of 3 pending>"
    wrong: Any = ["a transfer"]
    with pytest.raises(UsageError, match="not of 'a transfer'") as raised:
        Group(wrong)
    assert raised.value.code == "invalid-argument"


@pytest.mark.parametrize("num_agents", [1, 2])
def test_a_forked_child_does_not_wait_for_ever(fake_core: list[Any], num_agents: int) -> None:
    of_agents = [Members(fake_core) for _ in range(num_agents)]
    group = Group(members.add() for members in of_agents for _ in range(2))
    for members in of_agents:
        members.agent._completions.forked()
    for call in (group.wait, group.cancel, group.first_failure_blocking):
        with pytest.raises(AgentError, match="fork"):
            call()
