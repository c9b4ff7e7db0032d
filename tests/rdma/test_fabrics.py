"""The transports libfabric and ucx over Soft-RoCE, by verbs: through ofi_rxm and through rc_verbs."""

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

pytestmark = [
    pytest.mark.rdma,
    pytest.mark.usefixtures("machine"),
    pytest.mark.transports("libfabric", "ucx"),
]

# Expected peers per endpoint. ofi_rxm multiplies its queues by them; with 256 they are too long for
# Soft-RoCE.
os.environ.setdefault("FI_UNIVERSE_SIZE", "16")
# UCX connects its queue pairs by UD. With the address that it takes by itself, an IPv4 one, none of its UD
# packets arrive.
os.environ.setdefault("UCX_IB_GID_INDEX", "0")

NAMED = {
    "libfabric": {"provider": "verbs;ofi_rxm", "devices": "rxe0"},
    "ucx": {"transports": "rc_verbs,ud_verbs", "devices": "rxe0:1"},
}


def over_roce(transport: str, way: str) -> dict[str, Any]:
    named = {**NAMED[transport], "way": way}
    return {
        "transports": (transport,),
        "transport_options": {f"{transport}.{name}": value for name, value in named.items()},
    }


OPTIONS = AgentOptions(
    eager_nbytes=0,
    silent_timeout_s=conformance.BOUND_S,
    handshake_timeout_s=conformance.BOUND_S,
)


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("way", ["read", pytest.param("write", marks=pytest.mark.slow)])
@pytest.mark.parametrize("transport", NAMED)
def test_contract(transport: str, way: str, check: Check, seed: int) -> None:
    options = replace(OPTIONS, require=(transport,), **over_roce(transport, way))
    check(lambda shape: connected_pair(options, shape=shape, seed=seed))


# By day only the tests in which an endpoint is closed while reads are under way: of a dead peer, and of a
# sleeping one.
BY_DAY = ("source killed, read", "destination killed, read", "reader slept, revoke")


@pytest.mark.parametrize("way", ["read", pytest.param("write", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "fault",
    [fault if fault in BY_DAY else pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS],
)
@pytest.mark.parametrize("transport", ["libfabric", pytest.param("ucx", marks=pytest.mark.slow)])
def test_faults_of_processes(transport: str, fault: str, way: str) -> None:
    with ExitStack() as closing:

        def made(kind: type[Any], end: str, name: str, _: str = "", *arguments: Any, **options: Any) -> Any:
            node = kind(name, "tcp", *arguments, **{**over_roce(transport, way), **options})
            closing.callback(getattr(node, end))
            return node

        FAULTS[fault](transport, partial(made, Node, "close"), partial(made, Worker, "finish"))
