"""Many small nodes in one process, which a worker runs beside its own node (`Worker.do`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from tests.fault.node import Node

# Each has a block of 64 KiB.
SHAPE: Final = (4, 2, 1, 8, 4, 128)

_nodes: dict[int, Node] = {}


def join(numbers: Iterable[int], transport: str, address: str) -> None:
    """Makes a node for each number, filled with that number, and connects it."""
    for number in numbers:
        node = _nodes[number] = Node(name_of(number), transport, SHAPE)
        node.set(number)
        node.connect(address)


def name_of(number: int) -> str:
    return f"peer-{number}"


def begin(numbers: Iterable[int]) -> None:
    """Each node begins to write half of its block to the block of its number, tagged with its name."""
    for number in numbers:
        node = _nodes[number]
        remote = node.peers[-1].regions["kv"]
        node.works.append(
            node.agent.write(
                node.region, remote, [0], [number], notify=name_of(number).encode(), hold=True, timeout_s=60.0
            )
        )
        node.release(node.num_layers // 2)


def finish(numbers: Iterable[int]) -> list[Any]:
    """Each node writes the rest; returns the outcomes of the writes."""
    for number in numbers:
        _nodes[number].release(SHAPE[0])
    return [_nodes[number].end() for number in numbers]


def close(numbers: Iterable[int]) -> None:
    for number in numbers:
        _nodes.pop(number).close()
