"""Skips tests that need a GPU, with the reason, if there is no GPU that can run kernels."""

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
