"""Leases for a name, or for any peer, over every transport: a source grants before it knows the reader."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

from kvxfer import Agent, KVLayout, LeaseToken, Region, TransferError, UsageError
from kvxfer.options import AgentOptions

SHAPE = (3, 2, 16, 4, 2, 32)
IDS = [3, 9, 4, 12]
TIMEOUT_S = 10.0


@pytest.fixture(params=["loopback", "shm", "unix", "tcp"])
def options(request: pytest.FixtureRequest) -> AgentOptions:
    return AgentOptions(transports=(request.param,))


class End:
    """An agent with a cache."""

    def __init__(self, name: str, options: AgentOptions) -> None:
        self.agent = Agent(name, options)
        self.array = np.zeros(SHAPE, np.uint16)
        layout = KVLayout.from_tensor(self.array, "l2bthd")
        self.region: Region = self.agent.register("kv", self.array, layout)

    def read(self, address: str, lease: LeaseToken | None) -> str:
        """Connects if there is no session yet; returns how a read ended: ``"done"`` or the code."""
        peer = self.agent.connect_blocking(address, TIMEOUT_S)
        remote = peer.region_blocking("kv", TIMEOUT_S)
        read = self.agent.read(self.region, remote, IDS, IDS, lease=lease, timeout_s=TIMEOUT_S)
        try:
            read.wait(TIMEOUT_S)
        except TransferError as error:
            return error.code
        return "done"


@pytest.fixture
def make(options: AgentOptions) -> Iterator[Callable[[str], End]]:
    with ExitStack() as ends:

        def add(name: str) -> End:
            end = End(name, options)
            ends.callback(end.agent.close)
            return end

        yield add


def test_peers_that_connect_later_read_under_a_lease_that_they_name(make: Callable[[str], End]) -> None:
    prefill = make("prefill")
    prefill.array[...] = np.arange(prefill.array.size, dtype=np.uint16).reshape(SHAPE)
    lease = prefill.region.grant(None, IDS, ttl_s=60)
    assert lease.holder is None
    assert "any" in repr(lease)
    # On its way to decode, as a request's parameter.
    told = LeaseToken.parse(json.loads(json.dumps({"lease": str(lease.token)}))["lease"])
    assert told == lease.token
    assert (told.agent, told.incarnation) == ("prefill", prefill.agent.incarnation)
    for name in ("decode-0", "decode-1"):
        decode = make(name)
        # A read that does not name the token is refused, and so is a read with another token.
        assert decode.read(prefill.agent.address, None) == "not-permitted"
        assert decode.read(prefill.agent.address, LeaseToken.draw()) == "lease-ended"
        assert not decode.array.any()
        assert decode.read(prefill.agent.address, told) == "done"
        assert np.array_equal(decode.array[:, :, IDS], prefill.array[:, :, IDS])
    assert lease.active
    lease.revoke_blocking()
    assert (lease.state, lease.ended_blocking(0)) == ("revoked", "revoked")
    assert decode.read(prefill.agent.address, told) == "lease-ended"


def test_it_ends_by_its_time_or_with_its_region(make: Callable[[str], End]) -> None:
    prefill, decode = make("prefill"), make("decode")
    short = prefill.region.grant(None, ttl_s=0.2)
    # Heartbeats of the reader do not extend the lease.
    decode.read(prefill.agent.address, short.token)
    assert short.ended_blocking(TIMEOUT_S) == "expired"
    assert decode.read(prefill.agent.address, short.token) == "lease-ended"
    lease = prefill.region.grant(None)
    prefill.agent.peers[0].disconnect()
    assert lease.active, "a peer that goes takes nothing but its own reads along"
    prefill.region.deregister_blocking()
    assert lease.ended_blocking(TIMEOUT_S) == "region-gone"


def test_a_lease_to_write_needs_a_peer(make: Callable[[str], End]) -> None:
    prefill = make("prefill")
    with pytest.raises(UsageError, match=r"expect\(tag, blocks\)") as caught:
        prefill.region.grant(None, IDS, "write")
    assert caught.value.code == "invalid-argument"
    with pytest.raises(UsageError, match="leave renewable out"):
        prefill.region.grant(None, IDS, renewable=True)
    assert prefill.region.grant(None, IDS, renewable=False).active


@pytest.mark.parametrize(
    ("holder", "named"), [("decode-0", "decode-0"), ("decode-0/*", "decode-0/1.5f"), ("décode", "décode")]
)
def test_a_token_is_worth_nothing_to_other_names(make: Callable[[str], End], holder: str, named: str) -> None:
    prefill, other = make("prefill"), make("decode-01")
    prefill.array[...] = 7
    lease = prefill.region.grant(holder, IDS)
    assert (lease.holder, lease.state) == (holder, "active")
    assert holder in repr(lease)
    # As a router's log has it.
    token = LeaseToken.parse(str(lease.token))
    address = prefill.agent.address
    peer = other.agent.connect_blocking(address, TIMEOUT_S)
    read = other.agent.read(other.region, peer.regions["kv"], IDS, IDS, lease=token, timeout_s=TIMEOUT_S)
    with pytest.raises(
        TransferError, match=f"is for '{re.escape(holder)}', and you are 'decode-01'"
    ) as caught:
        read.wait(TIMEOUT_S)
    assert caught.value.code == "not-permitted"
    assert not other.array.any()
    for _ in range(2):  # connected later, and after a restart
        with Agent(named, prefill.agent.options) as agent:
            array = np.zeros(SHAPE, np.uint16)
            region = agent.register("kv", array, prefill.region.layout)
            remote = agent.connect_blocking(address, TIMEOUT_S).regions["kv"]
            agent.read(region, remote, IDS, IDS, lease=token, timeout_s=TIMEOUT_S).wait(TIMEOUT_S)
        assert (array[:, :, IDS] == 7).all()
    lease.revoke_blocking()
    assert other.read(address, token) == "lease-ended"


def test_agents_that_share_a_token_grant_what_was_told_before(make: Callable[[str], End]) -> None:
    token = LeaseToken.draw()
    decode = make("decode")
    for rank in range(2):
        prefill = make(f"prefill-{rank}")
        prefill.array[...] = rank + 1
        prefill.region.grant(None, IDS, token=token)
        with pytest.raises(UsageError, match="already granted"):
            prefill.region.grant(None, IDS, token=token)
        assert decode.read(prefill.agent.address, token) == "done"
        assert (decode.array[:, :, IDS] == rank + 1).all()
