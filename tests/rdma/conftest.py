"""What tests in the RDMA machine share; `make test-rdma` boots it and runs them there."""

from __future__ import annotations

import os

import pytest

from tests.rdma.machine import INSIDE


@pytest.fixture(scope="session")
def machine() -> None:
    """Of tests that need the machine: elsewhere there are no such devices, and the links are not theirs."""
    if INSIDE not in os.environ:
        pytest.skip("runs in the RDMA machine: make test-rdma")
