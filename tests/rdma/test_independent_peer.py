"""An agent and a peer with none of its code: the documented frames suffice to READ, and for no more."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import numpy as np
import pytest

import kvxfer
from kvxfer import AgentOptions
from kvxfer.address import Address
from tests.rdma.links import RXE0
from tests.rdma.test_machine import PYTHON

pytestmark = [pytest.mark.rdma, pytest.mark.usefixtures("machine")]

PEER = Path(__file__).with_name("independent_peer.py")
SECRET = b"a secret for tests only"


def test_a_peer_that_speaks_the_frames_reads_a_region_and_cannot_write_it(seed: int) -> None:
    options = AgentOptions(
        listen="tcp://127.0.0.1:0",
        secret=SECRET,
        transports=("verbs",),
        transport_options={"verbs.devices": RXE0.name},
    )
    with kvxfer.Pool(1, 1 << 20, name="independent") as pool, kvxfer.Agent("here", options) as agent:
        pages = pool.array((256, 4096), np.uint8)
        pages[:] = np.random.default_rng(seed).integers(0, 256, pages.shape, np.uint8)
        before = hashlib.sha256(pages.tobytes()).hexdigest()
        agent.register("pages", pages)
        port = Address.parse(agent.address, "address").port
        ended = subprocess.run(
            [PYTHON, str(PEER), str(port), SECRET.hex()], capture_output=True, text=True, timeout=120
        )
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.splitlines() == [f"read {before}", "write IBV_WC_REM_INV_REQ_ERR"]
        assert hashlib.sha256(pages.tobytes()).hexdigest() == before
