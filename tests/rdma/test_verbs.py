"""The transport verbs over Soft-RoCE: the contracts of every transport, and the effects of link faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest

from kvxfer import AgentOptions
from kvxfer.errors import KvxferError, PeerError
from kvxfer.testing import Pair, conformance, connected_pair, differing_layouts
from kvxfer.testing.conformance import Check
from tests.fault.node import MEDIUM, Node
from tests.rdma.links import RXE0, RXE1, RXE2, RXE3, Device, disordered, down, faults_seen, lossy, second_link
from tests.waiting import until

pytestmark = [pytest.mark.rdma, pytest.mark.usefixtures("machine")]

# Each end reaches itself too: with one device both agents use it; with two, each agent has a rail on either.
ONE, TWO = "rxe0", "rxe0,rxe1"
# An acknowledgement is awaited for 0.27 s, and a packet is sent again three times. With less, a busy emulated
# processor loses the rail.
QUICK = {"timeout": 16, "retries": 3}
# For a link that loses some packets: 67 ms, six times.
TOUGH = {"timeout": 14, "retries": 6}


def pairs(
    devices: str, shape: tuple[int, ...], seed: int, ways: str = "read"
) -> AbstractContextManager[Pair]:
    options = AgentOptions(
        transports=("verbs",),  # and tcp, for what a NIC cannot do
        require=("verbs",),
        transport_options={"verbs.devices": devices, "verbs.ways": ways},
        eager_nbytes=0,
        silent_timeout_s=conformance.BOUND_S,
        handshake_timeout_s=conformance.BOUND_S,
    )
    return connected_pair(options, shape=shape, seed=seed)


def name_of(check: Check) -> str:
    return check.__name__.removeprefix("check_")


@pytest.mark.parametrize("check", conformance.CHECKS, ids=name_of)
@pytest.mark.parametrize("devices", [ONE, pytest.param(TWO, marks=pytest.mark.slow)])
def test_contract(devices: str, check: Check, seed: int) -> None:
    check(lambda shape: pairs(devices, shape, seed))


@pytest.mark.slow
@pytest.mark.parametrize("check", conformance.CHECKS, ids=name_of)
def test_contract_by_write(check: Check, seed: int) -> None:
    check(lambda shape: pairs(TWO, shape, seed, "write"))


@pytest.mark.slow
@pytest.mark.parametrize("check", differing_layouts.CHECKS, ids=name_of)
def test_layouts_that_differ(check: Check, seed: int) -> None:
    """Programs that convert go over tcp."""
    check(lambda shape: pairs(ONE, shape, seed))


# ---- the link -----------------------------------------------------------------------------------


def on(*devices: Device, **options: int) -> dict[str, Any]:
    """Returns arguments for a `Node` or `Worker` with a rail on each device; ``options`` are of verbs."""
    told = {"devices": ",".join(device.name for device in devices), **QUICK, **options}
    return {
        "transports": ("verbs",),
        "transport_options": {f"verbs.{name}": value for name, value in told.items()},
    }


@contextmanager
def ends(
    here: dict[str, Any] | None = None, there: dict[str, Any] | None = None, **options: Any
) -> Iterator[tuple[Node, Node]]:
    """Yields two connected agents, each on its own device; the second's pages may be read."""
    with ExitStack() as closing:
        nodes = []
        for name, own in (("here", here or on(RXE0)), ("there", there or on(RXE1))):
            nodes.append(Node(name, "tcp", MEDIUM, **own, **options))
            closing.callback(nodes[-1].close)
        meet(*nodes)
        yield nodes[0], nodes[1]


def meet(here: Node, there: Node) -> None:
    here.connect(there.address())
    there.accept("here")
    until_up(here)
    there.grant("read")


def until_up(node: Node, num_rails: int = 1) -> None:
    until(lambda: node.rails().count("verbs") >= num_rails, lambda: node.peers[-1].notes)


def crosses_the_link(here: Node, there: Node, value: int) -> bool:
    """Reads all pages; returns whether they crossed the link between the devices. Sockets use loopback."""
    before = RXE1.sent_nbytes()
    assert read(here, there, value) is None
    assert here.is_all(value)
    return RXE1.sent_nbytes() - before > here.array.nbytes


def read(here: Node, there: Node, value: int) -> KvxferError | None:
    here.set(0)
    there.set(value)
    here.read()
    return here.end()


@pytest.mark.smoke
def test_pages_cross_the_link() -> None:
    with ends() as (here, there):
        assert crosses_the_link(here, there, 5)
        (path,) = here.peers[-1].paths
        to = f"{RXE1.address} (rxe1 port 1), by READ"
        assert path == f"verbs: rxe0 port 1 from GID 1, {RXE0.address}, RoCE v2, to {to}"


@pytest.mark.parametrize("fault", [lossy, down], ids=["packets lost", "link down"])
@pytest.mark.parametrize("broken", [RXE0, RXE1], ids=["here", "there"])
def test_a_link_that_fails_costs_its_rail_and_no_request(
    broken: Device, fault: Callable[[Device], AbstractContextManager[None]]
) -> None:
    with ends() as (here, there):
        assert crosses_the_link(here, there, 5)
        with fault(broken):
            assert not crosses_the_link(here, there, 6)
            # The rail may be back already, and be lost again with the next pages.
            assert here.stats()["rails_lost"] > 0
        until_up(here)
        assert crosses_the_link(here, there, 7)
        assert here.peer_state() == ("open", "")


def test_a_link_that_fails_loses_the_peer_where_verbs_is_required() -> None:
    with ends(require=("verbs",)) as (here, there):
        with lossy(RXE1):
            assert isinstance(read(here, there, 5), PeerError)
            assert here.wait_lost() == "peer-lost"
            assert "the last verbs rail" in here.loss_in_words()
        there.wait_lost()
        meet(here, there)
        assert crosses_the_link(here, there, 6)


@pytest.mark.parametrize("fault", [partial(lossy, percent=2.0), disordered], ids=["2% lost", "disorder"])
def test_pages_cross_a_bad_link_both_ways(
    fault: Callable[[Device], AbstractContextManager[None]], seed: int
) -> None:
    """Each lost packet costs a retry. It may also cost the rail, but never a request."""
    with ends(on(RXE0, **TOUGH), on(RXE1, **TOUGH)) as (here, there):
        evens, odds = here.all[::2], here.all[1::2]
        here.grant("read")
        here.fill(seed)
        there.fill(seed + 1)
        seen, sent = faults_seen(), [device.sent_nbytes() for device in (RXE0, RXE1)]
        with fault(RXE0), fault(RXE1):
            here.read(odds)
            there.read(evens)
            assert [node.end() for node in (here, there)] == [None, None]
        for node in (here, there):
            assert node.holds(seed, evens)
            assert node.holds(seed + 1, odds)
            assert node.peer_state() == ("open", "")
        assert faults_seen() > seen
        for device, before in zip((RXE0, RXE1), sent, strict=True):
            assert device.sent_nbytes() - before > 1 << 20


@pytest.mark.parametrize("broken", [RXE0, RXE3], ids=["requests lost", "answers lost"])
def test_one_of_two_rails_falls_silent_in_mid_transfer(broken: Device) -> None:
    with second_link(), ends(on(RXE0, RXE2), on(RXE1, RXE3)) as (here, there):
        until_up(here, num_rails=2)
        there.set(5)
        here.set(0)
        read = here.read_until_bytes_land(held=True)
        with lossy(broken):
            landed = (here.array == 5).mean()
            here.let_go()
            assert here.end(read) is None
            assert here.is_all(5)
        assert 0 < landed < 1
        stats = here.stats()
        # More than once if the rail was dialled again before packets came through.
        assert stats["rails_lost"] >= 1, here.peers[-1].notes
        assert stats["pieces_redone"] > 0
        # On a slow machine the other rail may fall silent too; then tcp carries the pages.
        assert here.works[read].rails == ("verbs",) or stats["rails_lost"] > 1
        assert "verbs" in here.works[read].rails
        assert here.peer_state() == ("open", "")
