"""Command rings of agents without a GPU: what is prepared, started, refused and counted."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

from kvxfer import Agent, AgentOptions, KVLayout
from kvxfer.errors import AgentError, PeerError, TransferError, UsageError
from tests.seeds import seed_of

TIMEOUT_S = 30.0
LAYERS, BLOCKS, NBYTES = 3, 8, 512


class Two:
    """Two agents of this process, a cache of some layers at each, and a ring of the first."""

    def __init__(self, src: Agent, dst: Agent) -> None:
        self.src, self.dst = src, dst
        shape = (LAYERS, BLOCKS, 1, NBYTES)
        self.pages = np.random.default_rng(seed_of("pages")).integers(1, 256, shape, np.uint8)
        self.landed = np.zeros_like(self.pages)
        layout = KVLayout.from_tensor(self.pages, "lbtd")
        self.region = src.register("kv", self.pages, layout)
        self.target = dst.register("kv", self.landed, layout)
        self.there = src.connect_blocking(dst.address, TIMEOUT_S)
        self.here = dst.accept_blocking("src", TIMEOUT_S)
        self.lease = self.target.grant(self.here, [0, 4, 5, 6, 7], "write", ttl_s=TIMEOUT_S)
        self.remote = self.there.region_blocking("kv", TIMEOUT_S)
        self.ring = src.command_ring(16)

    def prepare(self, **options: Any) -> Any:
        return self.ring.prepare_write(self.region, self.remote, [0, 1, 2, 3], [7, 6, 5, 4], **options)

    def arrived(self, pair: int, layer: int) -> bool:
        return bool((self.landed[layer, 7 - pair] == self.pages[layer, pair]).all())


@pytest.fixture(params=["loopback", "shm", "tcp"])
def two(request: pytest.FixtureRequest) -> Any:
    options = AgentOptions(listen="tcp://127.0.0.1:0", transports=(request.param,))
    with Agent("src", options) as src, Agent("dst", options) as dst:
        yield Two(src, dst)


def test_commands_move_their_pairs_and_layers(two: Two) -> None:
    prepared = two.prepare()
    assert (prepared.number, prepared.num_pairs) == (0, 4)
    assert two.ring.start(prepared, 1, layer=2)
    two.ring.ended_blocking(1, TIMEOUT_S)
    assert two.arrived(1, 2)
    assert not two.arrived(1, 0)
    assert not two.arrived(0, 2)
    assert two.ring.start(prepared, 2, num_pairs=2)
    two.ring.ended_blocking(2, TIMEOUT_S)
    assert all(two.arrived(pair, layer) for pair in (2, 3) for layer in range(LAYERS))
    assert not two.landed[:, :4].any()
    assert (two.ring.num_taken, two.ring.num_ended, two.ring.num_failed) == (2, 2, 0)
    assert two.ring.take_failures() == []
    assert repr(two.ring) == "<CommandRing of 16: 2 of 2 ended>"
    assert repr(prepared) == "<PreparedWrite 0: 4 pairs to dst>"


def test_layers_are_numbered_as_the_model_does(two: Two) -> None:
    prepared = two.prepare(layers=range(1, 3))
    for layer in (0, 1, 3):
        assert two.ring.start(prepared, 0, layer=layer)
    two.ring.ended_blocking(3, TIMEOUT_S)
    assert two.arrived(0, 1)
    assert not two.arrived(0, 2)
    first, second = two.ring.take_failures()
    assert two.ring.take_failures() == []
    assert (first.layer, second.layer) == (0, 3)
    assert "layer 3, but write 0 has 1 to 2" in str(second.error)


async def test_an_expectation_is_done_when_all_commands_have_brought_it(two: Two) -> None:
    incoming = two.dst.expect(b"req-42", [4, 5, 6, 7])
    prepared = two.prepare(notify=b"req-42")

    def kernel() -> None:
        for layer in range(LAYERS):
            for pair in range(4):
                assert two.ring.start(prepared, pair, layer)

    posting = threading.Thread(target=kernel)
    posting.start()
    await asyncio.wait_for(two.ring.ended(4 * LAYERS), TIMEOUT_S)
    await asyncio.wait_for(incoming, TIMEOUT_S)
    posting.join()
    assert all(two.arrived(pair, layer) for pair in range(4) for layer in range(LAYERS))


async def test_who_awaits_is_woken_by_commands_that_are_refused(two: Two) -> None:
    waiting = asyncio.ensure_future(two.ring.ended(1))
    await asyncio.sleep(0)
    two.prepare().forget()
    assert two.ring.start(two.prepare(), 9)
    await asyncio.wait_for(waiting, TIMEOUT_S)
    (failure,) = two.ring.take_failures()
    assert isinstance(failure.error, UsageError)
    assert (failure.index, failure.prepared, failure.pair, failure.num_pairs) == (0, 1, 9, 1)
    assert failure.layer is None
    assert failure.error.code == "out-of-range"


def test_a_full_ring_says_so(two: Two) -> None:
    # The block cannot be written yet. As many commands are under way as there is room for, and as many wait.
    parked = two.ring.prepare_write(two.region, two.remote, [0], [1], notify=b"soon", timeout_s=TIMEOUT_S)
    room = two.ring.num_commands
    for _ in range(room):
        assert two.ring.start(parked, 0)
    while two.ring.num_taken < room:
        two.src.poll()
    for _ in range(room):
        assert two.ring.start(parked, 0)
    assert not two.ring.start(parked, 0)
    assert (two.ring.num_taken, two.ring.num_ended) == (room, 0)
    two.target.grant(two.here, [1], "write", ttl_s=TIMEOUT_S)
    two.ring.ended_blocking(2 * room, TIMEOUT_S)
    assert two.ring.num_failed == 0


def test_a_lease_that_was_revoked_fails_the_command(two: Two) -> None:
    prepared = two.prepare()
    two.lease.revoke_blocking()
    assert two.ring.start(prepared, 0)
    two.ring.ended_blocking(1, TIMEOUT_S)
    (failure,) = two.ring.take_failures()
    assert isinstance(failure.error, TransferError)
    assert failure.error.code in ("lease-ended", "not-permitted")
    assert not two.landed.any()


def test_a_peer_that_left_fails_its_commands_and_no_others(two: Two) -> None:
    prepared = two.prepare()
    two.dst.close()
    assert two.src._completions.block_until(lambda: not two.src.peers, TIMEOUT_S)
    assert two.ring.start(prepared, 0)
    two.ring.ended_blocking(1, TIMEOUT_S)
    (failure,) = two.ring.take_failures()
    assert isinstance(failure.error, PeerError)
    assert failure.error.peer == "dst"
    with pytest.raises(PeerError):
        two.prepare()


def test_a_closed_ring_takes_no_more(two: Two) -> None:
    prepared = two.prepare()
    states = [two.ring.closed]
    with two.ring:
        states.append(two.ring.closed)
    states.append(two.ring.closed)
    assert states == [False, False, True]
    two.ring.close()
    for _ in range(two.ring.num_commands):
        assert two.ring.start(prepared, 0)
    assert not two.ring.start(prepared, 0)
    assert two.ring.num_taken == 0
    with pytest.raises(AgentError, match="the command ring is closed") as raised:
        two.prepare()
    assert raised.value.code == "closed"


def test_a_closed_agent_ends_its_rings(two: Two) -> None:
    prepared, ring = two.prepare(), two.ring
    two.src.close()
    assert ring.closed
    assert ring.start(prepared, 0)
    assert ring.num_taken == 0
    ring.close()
    for verb in (lambda: ring.ended_blocking(1, 0.1), two.prepare, two.src.command_ring):
        with pytest.raises(AgentError):
            verb()


def test_what_cannot_be_written_is_not_prepared(two: Two) -> None:
    ring, region, remote = two.ring, two.region, two.remote
    for src, dst, code in (
        ([0, 1], [0], "length-mismatch"),
        ([BLOCKS], [0], "out-of-range"),
        ([0], [BLOCKS], "out-of-range"),
    ):
        with pytest.raises(UsageError) as raised:
            ring.prepare_write(region, remote, src, dst)
        assert raised.value.code == code
    with pytest.raises(UsageError, match="layers"):
        ring.prepare_write(region, remote, [0], [0], layers=range(2, 5))
    with pytest.raises(UsageError, match="priority"):
        ring.prepare_write(region, remote, [0], [0], priority=900)
    with pytest.raises(UsageError, match=r"remote_region must be peer\.regions"):
        ring.prepare_write(region, region, [0], [0])  # type: ignore[arg-type]
    prepared = two.prepare()
    prepared.forget()
    with pytest.raises(UsageError, match="not prepared"):
        prepared.forget()


def test_pages_of_unlike_size_are_not_prepared() -> None:
    options = AgentOptions(listen="tcp://127.0.0.1:0", transports=("loopback",))
    with Agent("src", options) as src, Agent("dst", options) as dst:
        small, large = np.zeros((1, 4, 2, 64), np.uint8), np.zeros((1, 4, 4, 64), np.uint8)
        region = src.register("kv", small, KVLayout.from_tensor(small, "lbtd"))
        dst.register("kv", large, KVLayout.from_tensor(large, "lbtd"))
        remote = src.connect_blocking(dst.address, TIMEOUT_S).region_blocking("kv", TIMEOUT_S)
        with src.command_ring() as ring, pytest.raises(UsageError, match="differ in size") as raised:
            ring.prepare_write(region, remote, [0], [0])
        assert raised.value.code == "unsupported"
