"""First mistakes of new users, on real agents: each call fails at once, and the error names the mistake."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvxfer import Agent, AgentOptions, BlockTable, KVLayout, Lease, Pool
from kvxfer.errors import AgentError, PeerError, TransferError, UsageError
from kvxfer.transfer import Transfer


class Ends:
    """Two agents with a region each; decode's is empty, and grants nothing before `grant`."""

    def __init__(self, prefill: Agent, decode: Agent) -> None:
        self.prefill, self.decode = prefill, decode
        self.pages = np.arange(1, 16 * 64 + 1).astype(np.uint8).reshape(16, 64)
        self.target = np.zeros((16, 64), np.uint8)
        self.source = prefill.register("kv", self.pages)
        self.region = decode.register("kv", self.target)
        self.remote = prefill.connect_blocking(decode.address, 10).region_blocking("kv")

    def grant(self) -> Lease:
        return self.region.grant(self.decode.accept_blocking("prefill", 10), mode="write", ttl_s=60)

    def write(self, src_blocks: Any, dst_blocks: Any, **more: Any) -> Transfer:
        return self.prefill.write(self.source, self.remote, src_blocks, dst_blocks, **more)


@pytest.fixture
def ends() -> Iterator[Ends]:
    with Agent("prefill") as prefill, Agent("decode") as decode:
        yield Ends(prefill, decode)


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port on which no socket listens, and which stays taken during the test."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield int(taken.getsockname()[1])


@pytest.mark.parametrize("transports", [("shm", "tcp"), ("tcp",)])
def test_where_nobody_listens_is_unreachable(free_port: int, transports: tuple[str, ...]) -> None:
    with Agent("decode", options=AgentOptions(transports=transports)) as agent:
        with pytest.raises(PeerError, match=f"cannot connect to tcp://127.0.0.1:{free_port}: Conn") as caught:
            agent.connect_blocking(f"tcp://127.0.0.1:{free_port}", 10)
        assert caught.value.code == "unreachable"
        assert not agent.peers


@pytest.mark.parametrize("port", ["{0}", "-1", "+1", "0x10", "1e3", "http", "65536", "1 "])
def test_a_port_beyond_16_bits_is_no_other(port: str) -> None:
    """65,536 more than a port is not that port, as resolvers would have it."""
    with Agent("prefill") as prefill, Agent("decode") as decode:
        beyond = 65536 + int(prefill.address.rpartition(":")[2])
        with pytest.raises(UsageError, match="is not a port from 0 to 65535"):
            decode.connect_blocking(f"tcp://127.0.0.1:{port.format(beyond)}", 10)


@pytest.mark.parametrize("transports", [("shm", "tcp"), ("tcp",)])
def test_an_agent_that_connects_to_itself_is_told_so(transports: tuple[str, ...]) -> None:
    with Agent("prefill", options=AgentOptions(transports=transports)) as agent:
        with pytest.raises(
            (PeerError, UsageError), match="that is this agent's own address: use the address of another"
        ):
            agent.connect_blocking(agent.address, 10)
        assert not agent.peers


async def test_who_waits_for_a_peer_is_told_that_nobody_came() -> None:
    async with Agent("prefill") as agent:
        with pytest.raises(TimeoutError, match="ghost has not connected to prefill within"):
            await agent.accept("ghost", 0.05)
        with pytest.raises(TimeoutError, match="no peer has connected to prefill within"):
            agent.accept_blocking(timeout_s=0.05)
        waiting = asyncio.ensure_future(agent.accept("ghost"))
        await asyncio.sleep(0)
        await agent.aclose()
        with pytest.raises(AgentError, match="closed"):
            await waiting


@pytest.mark.parametrize(
    ("verb", "remedy"),
    [
        ("write", r'grant\(peer, mode="write"\) or, for one tag, with expect'),
        ("read", r"grant\(\)\. A read uses a lease for a name only if it passes the token, as lease="),
    ],
)
def test_who_has_no_right_is_told_who_gives_it_and_how(ends: Ends, verb: str, remedy: str) -> None:
    move = getattr(ends.prefill, verb)
    with pytest.raises(TransferError, match=f"no {verb} lease of yours covers blocks? .*{remedy}") as caught:
        move(ends.source, ends.remote, [1], [2], timeout_s=20).wait(10)
    assert caught.value.code == "not-permitted"


def test_a_tag_that_is_expected_with_other_blocks_is_refused_at_once(ends: Ends) -> None:
    incoming = ends.decode.expect(b"req", blocks=[9, 10])
    with pytest.raises(TransferError, match="block 11 is not among the 2 that were named") as caught:
        ends.write([1, 2, 3], [9, 10, 11], notify=b"req", timeout_s=20).wait(10)
    assert caught.value.code == "refused"
    assert incoming.state == "pending"
    assert not ends.target.any()
    ends.write([1, 2], [9, 10], notify=b"req").wait(10)
    incoming.wait(10)
    np.testing.assert_array_equal(ends.target[9:11], ends.pages[1:3])


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("timeout_s", "5", "timeout_s must be seconds"),
        ("integrity", "yes", "integrity must be True, False or None"),
        ("lease", "7", "lease must be a LeaseToken"),
        ("layers", 0, "layers must be a range"),
        ("priority", "first", "priority must be 0 to 255, not 'first'"),
        ("priority", 256, "priority must be 0 to 255, not 256"),
        ("notify", "text", "a notification must be bytes, not str"),
        ("src_blocks", None, "these are not block ids"),
        ("dst_blocks", None, "these are not block ids"),
        ("notify", bytes(4097), "a notification has at most 4096 bytes, not 4097"),
        ("src_blocks", [-1], "block id -1 is not in 0 to"),
        ("src_blocks", [[1]], "a block table must have one dimension"),
        ("dst_blocks", "9", "block ids must be integers"),
        ("dst_blocks", np.array([9.0]), "block ids must be integers"),
    ],
)
def test_an_argument_of_another_kind_is_named(
    ends: Ends, name: str, value: Any, words: str, repeated: bool
) -> None:
    """The check also holds if the same regions were just used, because that call takes a shorter path."""
    ends.grant()
    if repeated:
        ends.write([1], [9]).wait(10)
    done = ends.prefill.stats()["transfers_done"]
    with pytest.raises(UsageError, match=f"^{re.escape(words)}"):
        ends.write(**{"src_blocks": [1], "dst_blocks": [9], name: value})
    assert ends.prefill.stats()["transfers_open"] == 0
    assert ends.prefill.stats()["transfers_done"] == done


def test_numbers_of_numpy_are_numbers(ends: Ends) -> None:
    token = ends.grant().token
    for _ in range(2):
        ends.write(
            [1], [9], priority=np.uint8(3), timeout_s=np.float32(10), lease=token, hold=np.False_
        ).wait(10)


@pytest.mark.parametrize(
    "blocks",
    [
        [9, 10],
        (9, 10),
        range(9, 11),
        np.array([9, 10], np.uint32),
        np.array([9, 0, 10, 0], np.uint32)[::2],
        np.array([9, 10], np.int64),
        np.array([9, 10], ">u4"),
        BlockTable([9, 10]),
        iter([9, 10]),
    ],
    # Not an address: processes of pytest-xdist compare names.
    ids=lambda blocks: repr(blocks).partition(" object at ")[0],
)
def test_block_ids_of_every_kind_mean_the_same(ends: Ends, blocks: Any) -> None:
    ends.grant()
    ends.write([1], [3]).wait(10)
    ends.write([1, 2], blocks).wait(10)
    np.testing.assert_array_equal(ends.target[[3, 9, 10]], ends.pages[[1, 1, 2]])
    assert ends.target.any(axis=1).sum() == 3


def test_what_never_came_is_counted_and_what_was_never_released_is_said(ends: Ends) -> None:
    incoming = ends.decode.expect(b"req", blocks=[9, 10], timeout_s=0.2)
    held = ends.write([1], [9], notify=b"other", timeout_s=0.2, hold=True)
    with pytest.raises(TransferError, match=r"^2 of the 2 expected blocks of region 'kv'"):
        incoming.wait(10)
    # The end whose time is over first words the error.
    with pytest.raises(TransferError, match=r"1 of its 1 layers had not been released|no lease of the"):
        held.wait(10)


@pytest.mark.transports("shm", "tcp")
def test_a_rail_that_cannot_reach_a_region_says_why_in_its_notes() -> None:
    """No descriptor is left to share the pool with peers, so the region is reached over the other rails."""
    with Agent("prefill", options=AgentOptions(transports=("shm", "tcp"))) as agent:
        pool = Pool(1, 4096, huge_pages=False)
        assert agent.register("first", np.zeros((1, 4096), np.uint8)).notes == ()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            region = agent.register("pool", pool.array((1, 4096)))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert len(region.notes) == 1
        assert re.match("shm: dup of a pool's descriptor: Too many open files", region.notes[0])
        region.deregister_blocking()
        with pytest.raises(UsageError, match="was deregistered"):
            _ = region.notes


def test_released_layers_are_counted_in_all_and_stay_released() -> None:
    with Agent("prefill") as prefill, Agent("decode") as decode:
        cache = np.ones((4, 8, 64), np.uint8)
        layout = KVLayout.from_tensor(cache, "lbd")
        source = prefill.register("kv", cache, layout)
        decode.register("kv", np.zeros_like(cache), layout)
        remote = prefill.connect_blocking(decode.address, 10).region_blocking("kv")
        incoming = decode.expect(b"req", blocks=[3])
        write = prefill.write(source, remote, [1], [3], notify=b"req", hold=True)
        for num_layers in (2, 1, 0):
            write.mark_ready(num_layers)
        incoming.layer_blocking(1, 10)
        assert not incoming.layer_arrived(2)
        write.mark_ready(4)
        write.wait(10)
        write.mark_ready(1)
        assert write.succeeded


def test_who_disconnects_twice_is_told_nothing() -> None:
    with Agent("prefill") as prefill, Agent("decode") as decode:
        peer = prefill.connect_blocking(decode.address, 10)
        for _ in range(2):
            peer.disconnect()
            assert peer.state == "lost"
        with pytest.raises(PeerError) as caught:
            peer.send(b"message")
        assert caught.value.code == "peer-lost"


def test_who_accepts_by_name_gets_a_peer_that_was_dialled_and_who_accepts_anybody_does_not() -> None:
    with Agent("prefill") as prefill, Agent("decode") as decode:
        dialled = prefill.connect_blocking(decode.address, 10)
        assert prefill.accept_blocking("decode", 10) is dialled
        assert prefill.accept_blocking("decode", 10) is dialled
        with pytest.raises(TimeoutError):
            prefill.accept_blocking(timeout_s=0.01)
        called = decode.accept_blocking("prefill", 10)
        assert decode.accept_blocking("prefill", 10) is called
        with pytest.raises(TimeoutError):
            decode.accept_blocking(timeout_s=0.01)
