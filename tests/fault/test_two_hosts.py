"""Two hosts with a cable between them: real routes and addresses, a link that is slow, cut and restored."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvxfer.errors import PeerError, TransferError
from tests.fault.cable import Cable, why_not
from tests.fault.node import BOUND_S, HASTY_S, MEDIUM, SECRET, Worker

LOST = {"peer-lost", "peer-silent"}
Ends = tuple[Worker, Worker]


@pytest.fixture(scope="module", autouse=True)
def _possible() -> None:
    if reason := why_not():
        pytest.skip(f"two hosts on this one: {reason}")


@pytest.fixture
def cable() -> Iterator[Callable[..., Cable]]:
    cables: list[Cable] = []

    def make(names: dict[str, tuple[str, ...]] | None = None) -> Cable:
        cables.append(Cable(names))
        return cables[-1]

    yield make
    for one in cables:
        one.__exit__(None, None, None)


def ends_of(cable: Cable, ipv6: bool = False, **options: Any) -> Ends:
    """One node on each host, not yet connected; `there` has the bytes."""
    options = {"secret": SECRET, "shape": MEDIUM, **options}
    nodes = []
    for host in (cable.here, cable.there):
        address = f"[{host.ipv6}]" if ipv6 else host.ipv4
        name = "here" if host is cable.here else "there"
        nodes.append(host.node(name, "tcp", listen=f"tcp://{address}:0", **options))
    nodes[1].fill(3)
    return nodes[0], nodes[1]


def meet(here: Worker, there: Worker, address: str = "") -> None:
    here.connect(address or there.address())
    there.accept("here")


@pytest.mark.parametrize("ipv6", [False, True], ids=["ipv4", "ipv6"])
def test_pages_cross_both_ways(cable: Callable[..., Cable], ipv6: bool) -> None:
    here, there = ends_of(cable(), ipv6)
    meet(here, there)
    assert set(here.rails()) == {"tcp"}
    there.grant("read")
    here.read()
    assert here.end() is None
    assert here.holds(3)
    here.expect(b"back")
    there.fill(4)
    there.write(notify=b"back")
    assert there.end() is None
    assert here.end() is None
    assert here.holds(4)


@pytest.mark.parametrize("ipv6", [False, True], ids=["ipv4", "ipv6"])
def test_who_listens_everywhere_tells_the_address_on_the_cable(
    cable: Callable[..., Cable], ipv6: bool
) -> None:
    """Without a default route, `address` is in an attached network; `address_for` follows the route."""
    one = cable()
    options: dict[str, Any] = {
        "secret": SECRET,
        "shape": MEDIUM,
        "listen": f"tcp://{'[::]' if ipv6 else '0.0.0.0'}:0",
    }
    here, there = (
        host.node(name, "tcp", **options) for host, name in ((one.here, "here"), (one.there, "there"))
    )
    far, near = (host.ipv6 if ipv6 else host.ipv4 for host in (one.here, one.there))
    told = there.address_for(f"tcp://[{far}]" if ipv6 else f"tcp://{far}")
    port = there.address().rpartition(":")[2]
    assert told == (f"tcp://[{near}]:{port}" if ipv6 else f"tcp://{near}:{port}")
    assert there.address() == f"tcp://{one.there.ipv4}:{port}"
    here.connect(told)
    there.accept("here")
    there.fill(3)
    there.grant("read")
    here.read()
    assert here.end() is None
    assert here.holds(3)


def test_whose_unix_sockets_cannot_be_heard_is_reached_over_tcp(cable: Callable[..., Cable]) -> None:
    here, there = ends_of(cable(), transports=("shm", "tcp"))
    meet(here, there)
    there.grant("read")
    here.read()
    assert here.end() is None
    assert here.holds(3)
    assert set(here.rails()) == {"tcp"}


def test_without_the_secret_nobody_comes_in(cable: Callable[..., Cable]) -> None:
    one = cable()
    here, _ = ends_of(one)
    stranger = one.there.node("stranger", "tcp", listen="", secret=b"another secret, as long")
    with pytest.raises(PeerError) as caught:
        stranger.connect(here.address())
    assert caught.value.code == "auth-failed"


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_cut_cable_ends_both_sides_and_lets_nothing_land_later(
    cable: Callable[..., Cable], operation: str
) -> None:
    one = cable()
    one.limit(20)  # 32 MiB take longer than to cut it
    here, there = ends_of(one, silent_timeout_s=HASTY_S)
    meet(here, there)
    here.set(0)
    if operation == "read":
        there.grant("read")
        here.read_until_bytes_land(held=True)
    else:
        here.expect(b"pushed")
        there.write_all_but_the_last_layer(notify=b"pushed")
        here.until_bytes_land()
    one.cut()
    for end in (here, there) if operation == "write" else (here,):
        error = end.end()
        assert isinstance(error, (TransferError, PeerError))
        assert error.code in LOST
    assert there.wait_lost() in LOST
    assert here.wait_lost() in LOST
    here.set(7)
    one.mend()
    # Bytes that the kernel kept for retransmission arrive now, or never.
    assert here.stays(7, 1.0)
    meet(here, there)
    there.grant("read")
    here.read()
    assert here.end() is None
    assert here.holds(3)


def test_a_cable_that_is_out_for_a_moment_costs_that_moment(cable: Callable[..., Cable]) -> None:
    one = cable()
    one.limit(20)
    here, there = ends_of(one)
    meet(here, there)
    there.grant("read")
    here.set(0)
    here.read_until_bytes_land(held=True)
    one.cut()
    landed = -1
    # Bytes in the socket's buffer still land; then nothing does.
    while landed != (now := here.stats()["bytes_in"]):
        landed = now
        time.sleep(0.5)
    assert landed < 32 << 20
    assert here.state() == "pending"
    one.mend()
    here.let_go()
    assert here.end(timeout_s=2 * BOUND_S) is None
    assert here.holds(3)
    assert here.peer_state() == ("open", "")


def test_a_name_with_an_address_that_nobody_listens_on(cable: Callable[..., Cable]) -> None:
    one = cable({"decode-0": ("fd77::2", "10.77.0.9", "10.77.0.2"), "nowhere": ("fd77::2", "10.77.0.2")})
    here, there = ends_of(one)
    port = there.address().rpartition(":")[2]
    meet(here, there, f"tcp://decode-0:{port}")
    there.grant("read")
    here.read()
    assert here.end() is None
    assert here.holds(3)
    assert set(here.rails()) == {"tcp"}
    with pytest.raises(PeerError) as caught:
        here.connect("tcp://nowhere:9")
    assert caught.value.code == "unreachable"
    for address in ("[fd77::2]:9", "10.77.0.2:9"):
        assert address in str(caught.value)
