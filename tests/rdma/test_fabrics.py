"""The transport libfabric over Soft-RoCE: reads and writes of verbs, through libfabric's ofi_rxm."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kvxfer import AgentOptions
from kvxfer.testing import conformance, connected_pair
from kvxfer.testing.conformance import Check
from tests.fault.node import Node, Worker
from tests.rdma.test_verbs_faults import FAULTS

pytestmark = [pytest.mark.rdma, pytest.mark.usefixtures("machine"), pytest.mark.transports("libfabric")]

# Expected peers per endpoint. ofi_rxm multiplies its queues by them; with 256 they are too long for
# Soft-RoCE.
os.environ.setdefault("FI_UNIVERSE_SIZE", "16")


def over_rxm(way: str) -> dict[str, Any]:
    named = {"provider": "verbs;ofi_rxm", "devices": "rxe0", "way": way}
    return {
        "transports": ("libfabric",),
        "transport_options": {f"libfabric.{name}": value for name, value in named.items()},
    }


OPTIONS = AgentOptions(
    require=("libfabric",),
    eager_nbytes=0,
    silent_timeout_s=conformance.BOUND_S,
    handshake_timeout_s=conformance.BOUND_S,
)


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("way", ["read", pytest.param("write", marks=pytest.mark.slow)])
def test_contract(way: str, check: Check, seed: int) -> None:
    options = replace(OPTIONS, **over_rxm(way))
    check(lambda shape: connected_pair(options, shape=shape, seed=seed))


# By day only the tests in which an endpoint is closed while reads are under way: of a dead peer, and of a
# sleeping one.
BY_DAY = ("source killed, read", "destination killed, read", "reader slept, revoke")


@pytest.mark.parametrize("way", ["read", pytest.param("write", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "fault",
    [fault if fault in BY_DAY else pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS],
)
def test_faults_of_processes(fault: str, way: str) -> None:
    with ExitStack() as closing:

        def made(kind: type[Any], end: str, name: str, _: str = "", *arguments: Any, **options: Any) -> Any:
            node = kind(name, "tcp", *arguments, **{**over_rxm(way), **options})
            closing.callback(getattr(node, end))
            return node

        FAULTS[fault]("libfabric", partial(made, Node, "close"), partial(made, Worker, "finish"))
