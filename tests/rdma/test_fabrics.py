"""The transport libfabric over Soft-RoCE: reads of verbs, through libfabric's ofi_rxm."""

from __future__ import annotations

import os

import pytest

from kvxfer import AgentOptions
from kvxfer.testing import conformance, connected_pair
from kvxfer.testing.conformance import Check

pytestmark = [pytest.mark.rdma, pytest.mark.usefixtures("machine"), pytest.mark.transports("libfabric")]

# Peers of an endpoint, by which ofi_rxm multiplies its queues: of 256 they are longer than Soft-RoCE takes.
os.environ.setdefault("FI_UNIVERSE_SIZE", "16")

OPTIONS = AgentOptions(
    transports=("libfabric",),
    require=("libfabric",),
    transport_options={"libfabric.provider": "verbs;ofi_rxm", "libfabric.devices": "rxe0"},
    eager_nbytes=0,
    silent_timeout_s=conformance.BOUND_S,
    handshake_timeout_s=conformance.BOUND_S,
)


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_contract(check: Check, seed: int) -> None:
    check(lambda shape: connected_pair(OPTIONS, shape=shape, seed=seed))
