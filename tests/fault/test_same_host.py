"""Agents of one host connect over a unix socket beside the TCP port, or else over the port."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

import kvxfer


def unix_name(agent: kvxfer.Agent) -> str:
    return "kvxfer-" + agent.address.removeprefix("tcp://")


def num_listening(name: str) -> int:
    lines = Path("/proc/net/unix").read_text().splitlines()
    return sum(line.split()[-1] == f"@{name}" for line in lines)


def num_tcp(agent: kvxfer.Agent) -> int:
    """Connections to the agent's port, from /proc/net/tcp; both ends of each are counted."""
    port = f":{int(agent.address.rpartition(':')[2]):04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(port in line.split()[1] + line.split()[2] and line.split()[3] == "01" for line in lines)


@pytest.mark.parametrize("transport", ["shm", "unix"])
def test_control_goes_over_the_unix_socket(transport: str) -> None:
    options = kvxfer.AgentOptions(transports=(transport,))
    with kvxfer.Agent("near", options) as near, kvxfer.Agent("far", options) as far:
        assert num_listening(unix_name(far)) >= 1
        near.connect_blocking(far.address, 10)
        far.accept_blocking("near", 10)
        assert num_tcp(far) == 0


def test_tcp_alone_stays_on_tcp() -> None:
    options = kvxfer.AgentOptions(transports=("tcp",))
    with kvxfer.Agent("near", options) as near, kvxfer.Agent("far", options) as far:
        near.connect_blocking(far.address, 10)
        far.accept_blocking("near", 10)
        assert num_tcp(far) >= 2


def test_a_name_that_is_taken_leaves_the_port() -> None:
    """Another process listens on the unix name of the agent's port, and never answers."""
    options = kvxfer.AgentOptions(transports=("shm",))
    with kvxfer.Agent("probe", options) as probe:
        address = probe.address
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as squatter:
        squatter.bind("\0kvxfer-" + address.removeprefix("tcp://"))
        with (
            kvxfer.Agent("far", kvxfer.AgentOptions(transports=("shm",), listen=address)) as far,
            kvxfer.Agent("near", options) as near,
        ):
            # The name is bound but not listening: the connection is refused, and the port is dialled.
            peer = near.connect_blocking(far.address, 10)
            assert far.accept_blocking("near", 10).state == "open"
            assert "shm" in peer.rails


def test_a_transport_that_is_required_comes_up_or_nothing_does() -> None:
    near = kvxfer.AgentOptions(transports=("shm", "tcp"), require=("tcp",))
    far = kvxfer.AgentOptions(transports=("shm", "tcp"))
    with kvxfer.Agent("near", near) as here, kvxfer.Agent("far", far) as there:
        # Otherwise tcp would not be dialled beside shm.
        assert {"shm", "tcp"} <= set(here.connect_blocking(there.address, 10).rails)
    far = kvxfer.AgentOptions(transports=("shm",))
    with kvxfer.Agent("near", near) as here, kvxfer.Agent("far", far) as there:
        with pytest.raises(kvxfer.PeerError) as caught:
            here.connect_blocking(there.address, 10)
        assert caught.value.code == "unreachable"
        assert "no tcp rail to 'far' came up, which this agent requires" in str(caught.value)
        assert "the peer does not offer it" in str(caught.value)
