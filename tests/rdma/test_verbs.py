"""The transport verbs over Soft-RoCE: the contracts of every transport, and what faults of the link cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from kvxfer import AgentOptions
from kvxfer.errors import PeerError
from kvxfer.testing import Pair, conformance, connected_pair, differing_layouts
from kvxfer.testing.conformance import Check
from tests.fault.node import BOUND_S, MEDIUM, Node
from tests.rdma.links import RXE0, RXE1, Device, down, lossy

pytestmark = [pytest.mark.rdma, pytest.mark.usefixtures("machine")]

# Each end reaches itself too: with one device both agents use it, with two each has a rail on either.
ONE, TWO = "rxe0", "rxe0,rxe1"
# A packet is waited for 4 ms, and sent again three times: a rail is lost after some 20 ms.
QUICK = {"verbs.timeout": 10, "verbs.retries": 3}


def pairs(devices: str, *transports: str, shape: tuple[int, ...], seed: int) -> AbstractContextManager[Pair]:
    options = AgentOptions(
        transports=transports,
        transport_options={"verbs.devices": devices},
        silent_timeout_s=conformance.BOUND_S,
        handshake_timeout_s=conformance.BOUND_S,
    )
    return connected_pair(options, shape=shape, seed=seed)


def name_of(check: Check) -> str:
    return check.__name__.removeprefix("check_")


@pytest.mark.parametrize("check", conformance.CHECKS, ids=name_of)
@pytest.mark.parametrize("devices", [ONE, pytest.param(TWO, marks=pytest.mark.slow)])
def test_contract(devices: str, check: Check, seed: int) -> None:
    check(lambda shape: pairs(devices, "verbs", shape=shape, seed=seed))


@pytest.mark.slow
@pytest.mark.parametrize("check", differing_layouts.CHECKS, ids=name_of)
def test_layouts_that_differ(check: Check, seed: int) -> None:
    """What converts goes over tcp."""
    check(lambda shape: pairs(ONE, "verbs", "tcp", shape=shape, seed=seed))


# ---- the link -----------------------------------------------------------------------------------


@contextmanager
def ends(*transports: str) -> Iterator[tuple[Node, Node]]:
    """Two agents, each on a device of its own, connected; the second's pages may be read."""
    nodes = [
        Node(
            name,
            "tcp",
            MEDIUM,
            transports=transports,
            transport_options={"verbs.devices": each.name, **QUICK},
        )
        for name, each in (("here", RXE0), ("there", RXE1))
    ]
    try:
        here, there = nodes
        here.connect(there.address())
        there.accept("here")
        here.wait_rails(*transports)
        there.grant("read")
        yield here, there
    finally:
        for node in nodes:
            node.close()


def read(here: Node, there: Node, value: int) -> BaseException | None:
    here.set(0)
    there.set(value)
    here.read()
    return here.end()


def test_pages_cross_the_link() -> None:
    with ends("verbs") as (here, there):
        before = RXE1.sent_nbytes()
        assert read(here, there, 5) is None
        assert here.is_all(5)
        assert RXE1.sent_nbytes() - before > here.array.nbytes


@pytest.mark.parametrize("fault", [lossy, down], ids=["packets lost", "link down"])
@pytest.mark.parametrize("broken", [RXE0, RXE1], ids=["here", "there"])
def test_a_link_that_fails_costs_its_rail_and_no_request(
    broken: Device, fault: type[AbstractContextManager[None]]
) -> None:
    with ends("verbs", "tcp") as (here, there):
        assert read(here, there, 5) is None
        with fault(broken):
            assert read(here, there, 6) is None
            assert here.is_all(6)
            assert "verbs" not in here.rails()
            assert any("verbs" in note for note in here.peers[-1].notes)
        here.wait_rails("verbs", "tcp")
        before = RXE1.sent_nbytes()
        assert read(here, there, 7) is None
        assert here.is_all(7)
        assert RXE1.sent_nbytes() - before > here.array.nbytes
        assert here.peer_state() == ("open", "")


def test_a_link_that_fails_loses_the_peer_where_nothing_else_carries_pages() -> None:
    with ends("verbs") as (here, there):
        with lossy(RXE1):
            assert isinstance(read(here, there, 5), PeerError)
            assert here.wait_lost() == "peer-lost"
            assert "verbs" in here.loss_in_words()
        here.connect(there.address())
        there.accept("here", BOUND_S)
        there.grant("read")
        assert read(here, there, 6) is None
        assert here.is_all(6)
