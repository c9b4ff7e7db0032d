"""Nodes that end with their test, in whatever state they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

from tests.fault.node import Node, Worker


@pytest.fixture(
    params=["shm", "tcp", "ucx", "libfabric", pytest.param("libfabric-written", marks=pytest.mark.slow)]
)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def local() -> Iterator[Callable[..., Node]]:
    """Makes nodes in this process."""
    nodes: list[Node] = []

    def make(name: str, *arguments: Any, **options: Any) -> Node:
        nodes.append(Node(name, *arguments, **options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


@pytest.fixture
def remote() -> Iterator[Callable[..., Worker]]:
    """Makes nodes, each in its own process."""
    workers: list[Worker] = []

    def make(name: str, *arguments: Any, **options: Any) -> Worker:
        workers.append(Worker(name, *arguments, **options))
        return workers[-1]

    yield make
    for worker in workers:
        worker.finish()
