"""Fixtures for tests in the RDMA machine; `make test-rdma` boots it and runs them there."""

from __future__ import annotations

import os

import pytest

from tests.rdma.machine import INSIDE


@pytest.fixture(scope="session")
def machine() -> None:
    """Skips tests outside the machine: other hosts lack the devices, and their links must not be broken."""
    if INSIDE not in os.environ:
        pytest.skip("runs in the RDMA machine: make test-rdma")
