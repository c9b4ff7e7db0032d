"""What newcomers get wrong first, on real agents: each is told what it was, at once."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import numpy as np
import pytest

from kvxfer import Agent, AgentOptions
from kvxfer.errors import AgentError, PeerError, TransferError, UsageError


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


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
        with pytest.raises(UsageError, match="is no port of 0 to 65535"):
            decode.connect_blocking(f"tcp://127.0.0.1:{port.format(beyond)}", 10)


async def test_who_waits_for_a_peer_is_told_that_nobody_came() -> None:
    async with Agent("prefill") as agent:
        with pytest.raises(TimeoutError, match="ghost has not connected to prefill within"):
            await agent.accept("ghost", 0.05)
        with pytest.raises(TimeoutError, match="no peer has connected to prefill within"):
            agent.accept_blocking(timeout_s=0.05)
        waiting = asyncio.ensure_future(agent.accept("ghost"))
        await asyncio.sleep(0.01)
        await agent.aclose()
        with pytest.raises(AgentError, match="closed"):
            await waiting


def test_a_tag_that_is_expected_with_other_blocks_is_refused_at_once() -> None:
    with Agent("prefill") as prefill, Agent("decode") as decode:
        source = prefill.register("kv", np.ones((16, 64), np.uint8))
        target = np.zeros((16, 64), np.uint8)
        decode.register("kv", target)
        peer = prefill.connect_blocking(decode.address, 10)
        incoming = decode.expect(b"req", blocks=[9, 10])
        remote = peer.wait_region("kv")
        with pytest.raises(TransferError, match="block 11 is not among the 2 that were named") as caught:
            prefill.write(source, remote, [1, 2, 3], [9, 10, 11], notify=b"req", timeout_s=20).wait(10)
        assert caught.value.code == "refused"
        assert incoming.state == "pending"
        assert not target.any()
        prefill.write(source, remote, [1, 2], [9, 10], notify=b"req").wait(10)
        incoming.wait(10)
        assert target[9:11].all()


@pytest.mark.parametrize(
    ("name", "value"),
    [("timeout_s", "5"), ("integrity", "yes"), ("lease", "7"), ("layers", 0), ("priority", "first")],
)
def test_an_argument_of_another_kind_is_named(name: str, value: Any) -> None:
    with Agent("prefill") as prefill, Agent("decode") as decode:
        source = prefill.register("kv", np.ones((16, 64), np.uint8))
        decode.register("kv", np.zeros((16, 64), np.uint8))
        remote = prefill.connect_blocking(decode.address, 10).wait_region("kv")
        with pytest.raises(UsageError, match=f"^{name} is "):
            prefill.write(source, remote, [1], [9], **{name: value})


def test_what_never_came_is_counted_and_what_was_never_released_is_said() -> None:
    with Agent("prefill") as prefill, Agent("decode") as decode:
        source = prefill.register("kv", np.ones((16, 64), np.uint8))
        decode.register("kv", np.zeros((16, 64), np.uint8))
        remote = prefill.connect_blocking(decode.address, 10).wait_region("kv")
        incoming = decode.expect(b"req", blocks=[9, 10], timeout_s=0.2)
        held = prefill.write(source, remote, [1], [9], notify=b"other", timeout_s=0.2, hold=True)
        with pytest.raises(TransferError, match=r"^2 of the 2 blocks of region 'kv' that were expected"):
            incoming.wait(10)
        # Whichever end's time is over first says it in its own words.
        with pytest.raises(TransferError, match=r"1 of its 1 layers had not been released|no lease of the"):
            held.wait(10)
