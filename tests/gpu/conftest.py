"""Tests that need a GPU are skipped where there is none that kernels can run on, with the reason."""

from __future__ import annotations

import functools

import pytest

from kvxfer.gpu.availability import availability


@functools.cache
def _reason() -> str:
    return availability().reason


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and _reason():
        pytest.skip(_reason())
