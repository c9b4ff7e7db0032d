"""The addresses that agents publish, and where they lead: never a wildcard, never a wrong agent."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import numpy as np
import pytest

from kvxfer import Agent, AgentOptions, Peer, RegionDescriptor, address
from kvxfer.directory import Entry, InProcessDirectory
from kvxfer.errors import AgentError, PeerError, UsageError
from tests.waiting import until

SECRET = "0123456789abcdef"
BOUND_S = 60.0


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


IPV6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


def blocks(value: int = 0) -> Any:
    return np.full((16, 64), value, np.uint8)


def meet(how: str, agent: Agent, target: str | Entry | RegionDescriptor) -> Peer:
    """Connects by either twin."""
    if how == "blocking":
        return agent.connect_blocking(target, BOUND_S)
    return asyncio.run(agent.connect(target, BOUND_S))


BOTH = pytest.mark.parametrize("how", ["coroutine", "blocking"])


# ---- listening everywhere -----------------------------------------------------------------------------


@pytest.mark.parametrize("routes", ["a default route", "attached networks", "none"])
@pytest.mark.parametrize("listen", ["0.0.0.0", pytest.param("[::]", marks=IPV6), "[::ffff:0.0.0.0]"])
def test_who_listens_everywhere_is_somewhere(
    listen: str, routes: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every place that shows the agent's address has one at which the agent can be reached."""
    if routes != "a default route":
        monkeypatch.setattr(address, "_ANYWHERE", {"0.0.0.0": (), "::": ()})
    if routes == "none":
        monkeypatch.setattr(address, "_attached", lambda: iter(()))
    directory = InProcessDirectory()
    with (
        caplog.at_level(logging.WARNING, "kvxfer"),
        Agent("there", listen=f"tcp://{listen}:0", secret=SECRET, directory=directory) as there,
        Agent("here", secret=SECRET) as here,
    ):
        region = there.register("kv", blocks())
        told = {
            there.address,
            there.entry.address,
            region.descriptor.address,
            RegionDescriptor.from_bytes(region.descriptor.to_bytes()).address,
            directory.resolve_blocking("there", 0).address,
        }
        (said,) = told
        at = address.Address.parse(said, "address")
        assert not at.is_wildcard
        assert at.port == address.Address.parse(there._core.address, "address").port
        assert said in repr(there)
        if routes == "none":
            assert at.is_loopback
        if routes != "a default route":
            assert (
                f"no default route that tells the address at which peers reach it: it publishes {at.host}"
                in (caplog.text)
            )
        assert here.connect_blocking(said, BOUND_S).incarnation == there.incarnation


def test_an_agent_on_ipv4_and_ipv6_is_told_by_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        Agent("v4", listen="tcp://0.0.0.0:0", secret=SECRET) as v4,
        Agent("one", listen="tcp://127.0.0.1:0") as one,
        Agent("here", secret=SECRET) as here,
    ):
        loopback = f"tcp://127.0.0.1:{v4.address.rpartition(':')[2]}"
        peer = here.connect_blocking(loopback)
        for target in ("tcp://127.0.0.1", "tcp://127.0.0.9:7301", here.entry):
            assert v4.address_for(target) == loopback
        assert here.address_for(peer) == here.address
        assert (
            v4.address_for(v4.accept_blocking("here", BOUND_S)) == v4.address
        )  # it called, so its address is not known
        assert one.address_for("tcp://192.0.2.7:1") == one.address
        with pytest.raises(UsageError, match=r"^::1 cannot reach .* IPv4 or IPv6 only"):
            v4.address_for("tcp://[::1]")
        with pytest.raises(UsageError, match="'localhost' is a name"):
            v4.address_for("tcp://localhost")
        for target in ("127.0.0.1", "", "decode-0"):
            with pytest.raises(UsageError, match="target is"):
                v4.address_for(target)
    with pytest.raises(AgentError, match="closed"):
        v4.address_for("tcp://127.0.0.1")


@IPV6
def test_who_listens_on_ipv6_is_reached_by_ipv4_where_the_kernel_does_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Agent("v6", listen="tcp://[::]:0", secret=SECRET) as v6, Agent("here", secret=SECRET) as here:
        port = v6.address.rpartition(":")[2]
        assert v6.address_for("tcp://[::1]") == f"tcp://[::1]:{port}"
        if not address._is_ipv6_alone():
            assert v6.address_for("tcp://127.0.0.1") == f"tcp://127.0.0.1:{port}"
            here.connect_blocking(v6.address_for("tcp://127.0.0.1"))
        monkeypatch.setattr(address, "_is_ipv6_alone", lambda: True)
        with pytest.raises(UsageError, match=r"^127\.0\.0\.1 cannot reach"):
            v6.address_for("tcp://127.0.0.1")


# ---- an address that was given ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("advertise", "said"),
    [
        ("tcp://prefill.example:7301", "tcp://prefill.example:7301"),
        ("tcp://prefill.example", "tcp://prefill.example:{port}"),
        ("tcp://[fd00::7]", "tcp://[fd00::7]:{port}"),
        ("tcp://10.0.0.7:80", "tcp://10.0.0.7:80"),
    ],
)
@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:0", "tcp://0.0.0.0:0"])
def test_what_is_advertised_is_told(listen: str, advertise: str, said: str) -> None:
    directory = InProcessDirectory()
    with Agent("a", listen=listen, advertise=advertise, secret=SECRET, directory=directory) as agent:
        said = said.format(port=agent._core.address.rpartition(":")[2])
        region = agent.register("kv", blocks())
        assert agent.address == agent.address_for("tcp://127.0.0.1") == region.descriptor.address == said
        assert directory.list() == (agent.entry,)
        assert agent.entry.address == said


# ---- descriptors and entries --------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("form", ["descriptor", "entry"])
def test_what_travelled_leads_to_its_owner(form: str, how: str) -> None:
    """And to the session that is open, whichever side called, and however the address is spelled."""
    with Agent("there") as there, Agent("here") as here:
        region = there.register("kv", blocks(7))
        local = here.register("kv", blocks())
        target = (
            RegionDescriptor.from_bytes(region.descriptor.to_bytes())
            if form == "descriptor"
            else Entry.from_bytes(there.entry.to_bytes())
        )
        peer = meet(how, here, target)
        assert (peer.name, peer.incarnation, peer.address) == ("there", there.incarnation, there.address)
        assert peer.regions["kv"].address == there.address
        assert meet(how, here, target) is peer
        spelled = Entry("there", there.address.replace("127.0.0.1", "localhost"), there.incarnation)
        assert meet(how, here, spelled) is peer
        back = there.accept_blocking("here", BOUND_S)
        assert meet(how, there, here.entry) is back  # the session that was opened by the other side
        assert len(here.peers) == len(there.peers) == 1
        region.grant(back, [3], "read")
        if isinstance(target, RegionDescriptor):
            here.read(local, target, [3], [5]).wait(BOUND_S)
        peer.disconnect()
        again = meet(how, here, target)
        assert again is not peer
        assert again.incarnation == there.incarnation


@BOTH
@pytest.mark.parametrize("form", ["descriptor", "entry"])
def test_a_restarted_owner_is_another(form: str, how: str) -> None:
    with Agent("here") as here:
        with Agent("there") as there:
            region = there.register("kv", blocks())
            target = region.descriptor if form == "descriptor" else there.entry
            at = there.address
        with Agent("there", listen=at) as there:
            with pytest.raises(PeerError, match=f"{at} is there with another incarnation") as caught:
                meet(how, here, target)
            assert (caught.value.code, caught.value.peer) == ("peer-restarted", "there")
            until(lambda: not there.peers and not here.peers)
            assert here.connect_blocking(there.entry).incarnation == there.incarnation


def test_an_owner_without_an_address_is_looked_up() -> None:
    """By its name, and only in that incarnation."""
    directory = InProcessDirectory()
    with Agent("there", directory=directory) as there, Agent("here", directory=directory) as here:
        unsaid = Entry("there", "", there.incarnation)
        assert here.connect_blocking(unsaid).incarnation == there.incarnation
        with pytest.raises(PeerError, match="the directory has another incarnation of there than") as caught:
            here.connect_blocking(Entry("there", "", bytes(16)))
        assert caught.value.code == "peer-restarted"
    with Agent("lonely") as lonely, pytest.raises(UsageError, match="'there' is a name without an address"):
        lonely.connect_blocking(unsaid)
    with Agent("lonely") as lonely, pytest.raises(UsageError, match=r"write 'tcp://10\.0\.0\.7:7301'"):
        lonely.connect_blocking("10.0.0.7:7301")


@BOTH
def test_what_is_no_other_agent_is_refused_in_words(how: str) -> None:
    with Agent("here") as here:
        region = here.register("kv", blocks())
        for target in (here.entry, region.descriptor):
            with pytest.raises(UsageError, match="here is this agent itself"):
                meet(how, here, target)
        wrong: Any
        for wrong in (7, None, region, b"tcp://127.0.0.1:1"):
            with pytest.raises(UsageError, match="target must be"):
                meet(how, here, wrong)


def test_a_third_agent_can_be_told_of_a_region() -> None:
    """An agent that dialled the owner passes its address on; one that was called knows only its name."""
    with Agent("a") as a, Agent("b") as b, Agent("c", AgentOptions()) as c:
        a.register("kv", blocks(5))
        b.register("kv", blocks())
        of_a = b.connect_blocking(a.address).regions["kv"]
        assert c.connect_blocking(RegionDescriptor.from_bytes(of_a.to_bytes())).name == "a"
        of_b = a.accept_blocking("b", BOUND_S).regions["kv"]
        assert of_b.owner == Entry("b", "", b.incarnation)
