"""The transport verbs over Soft-RoCE: the contracts of every transport, and what faults of the link cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from kvxfer import AgentOptions
from kvxfer.errors import KvxferError, PeerError
from kvxfer.testing import Pair, conformance, connected_pair, differing_layouts
from kvxfer.testing.conformance import Check
from tests.fault.node import BOUND_S, MEDIUM, Node
from tests.rdma.links import RXE0, RXE1, Device, down, lossy

pytestmark = [pytest.mark.rdma, pytest.mark.usefixtures("machine")]

# Each end reaches itself too: with one device both agents use it, with two each has a rail on either.
ONE, TWO = "rxe0", "rxe0,rxe1"
# A packet is waited for 0.27 s, and sent again three times: less, and a busy emulated processor loses
# the rail.
QUICK = {"verbs.timeout": 16, "verbs.retries": 3}


def pairs(devices: str, shape: tuple[int, ...], seed: int) -> AbstractContextManager[Pair]:
    options = AgentOptions(
        transports=("verbs",),  # and tcp, which goes beside it for what a NIC cannot do
        require=("verbs",),
        transport_options={"verbs.devices": devices},
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
@pytest.mark.parametrize("check", differing_layouts.CHECKS, ids=name_of)
def test_layouts_that_differ(check: Check, seed: int) -> None:
    """What converts goes over tcp."""
    check(lambda shape: pairs(ONE, shape, seed))


# ---- the link -----------------------------------------------------------------------------------


@contextmanager
def ends(**options: Any) -> Iterator[tuple[Node, Node]]:
    """Two agents, each on a device of its own, connected; the second's pages may be read."""
    nodes = [
        Node(
            name,
            "tcp",
            MEDIUM,
            transports=("verbs",),
            transport_options={"verbs.devices": device.name, **QUICK},
            **options,
        )
        for name, device in (("here", RXE0), ("there", RXE1))
    ]
    try:
        here, there = nodes
        meet(here, there)
        yield here, there
    finally:
        for node in nodes:
            node.close()


def meet(here: Node, there: Node) -> None:
    here.connect(there.address())
    there.accept("here")
    until_up(here)
    there.grant("read")


def until_up(node: Node) -> None:
    deadline = time.monotonic() + BOUND_S
    while "verbs" not in node.rails():
        assert time.monotonic() < deadline, node.peers[-1].notes
        time.sleep(0.01)


def crosses_the_link(here: Node, there: Node, value: int) -> bool:
    """Reads all pages; whether they came from one device to the other, since sockets are on loopback."""
    before = RXE1.sent_nbytes()
    assert read(here, there, value) is None
    assert here.is_all(value)
    return RXE1.sent_nbytes() - before > here.array.nbytes


def read(here: Node, there: Node, value: int) -> KvxferError | None:
    here.set(0)
    there.set(value)
    here.read()
    return here.end()


def test_pages_cross_the_link() -> None:
    with ends() as (here, there):
        assert crosses_the_link(here, there, 5)


@pytest.mark.parametrize("fault", [lossy, down], ids=["packets lost", "link down"])
@pytest.mark.parametrize("broken", [RXE0, RXE1], ids=["here", "there"])
def test_a_link_that_fails_costs_its_rail_and_no_request(
    broken: Device, fault: Callable[[Device], AbstractContextManager[None]]
) -> None:
    with ends() as (here, there):
        assert crosses_the_link(here, there, 5)
        with fault(broken):
            assert not crosses_the_link(here, there, 6)
            assert here.stats()["rails_lost"] > 0  # it may be back already, and be lost with the next pages
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
