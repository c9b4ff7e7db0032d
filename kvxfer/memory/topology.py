"""NUMA topology, i.e. which CPUs and memory are near each other, read from Linux's /sys. Only reads."""

from __future__ import annotations

import os
from pathlib import Path

SYSFS = Path("/sys")


def parse_cpu_list(text: str) -> set[int]:
    """Reads the kernel's list format, e.g. ``"0-3,8,10-11"``; empty text is no CPU."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def numa_nodes(root: Path = SYSFS) -> dict[int, set[int]]:
    """Returns the CPUs of every NUMA node, by node; ``{0: all}`` if the kernel reports none."""
    nodes = {}
    for folder in sorted(root.glob("devices/system/node/node[0-9]*")):
        try:
            nodes[int(folder.name.removeprefix("node"))] = parse_cpu_list((folder / "cpulist").read_text())
        except (OSError, ValueError):
            continue  # a node that went offline while we looked
    return nodes or {0: set(range(os.cpu_count() or 1))}


def node_of_cpu(cpu: int, root: Path = SYSFS) -> int | None:
    """Returns the NUMA node of a CPU, or None if no node has it."""
    for node, cpus in numa_nodes(root).items():
        if cpu in cpus:
            return node
    return None


def node_of_process(root: Path = SYSFS) -> int | None:
    """Returns the NUMA node to which all CPUs of this process belong; None if there are several.

    Use it as ``numa_node`` for the pool of an engine that is pinned to a node.
    """
    allowed = os.sched_getaffinity(0)
    for node, cpus in numa_nodes(root).items():
        if allowed <= cpus:
            return node
    return None


def node_of_device(address: str, root: Path = SYSFS) -> int | None:
    """Returns the NUMA node of a PCI device (``"0000:3b:00.0"``); None if the kernel knows none."""
    try:
        node = int((root / "bus/pci/devices" / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
