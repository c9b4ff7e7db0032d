"""topology: what /sys contains, and what it does not contain."""

from __future__ import annotations

import os
from pathlib import Path

from kvxfer.memory import topology


def sysfs(root: Path) -> Path:
    for node, cpus in ((0, "0-3,8\n"), (1, "4-7,9-10\n"), (2, "\n")):
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
    device = root / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    return root


def test_nodes(tmp_path: Path) -> None:
    root = sysfs(tmp_path)
    assert topology.numa_nodes(root) == {0: {0, 1, 2, 3, 8}, 1: {4, 5, 6, 7, 9, 10}, 2: set()}
    assert topology.node_of_cpu(9, root) == 1
    assert topology.node_of_cpu(77, root) is None
    assert topology.node_of_device("0000:3B:00.0", root) == 1
    assert topology.node_of_device("0000:00:00.0", root) is None


def test_a_kernel_that_tells_nothing(tmp_path: Path) -> None:
    assert topology.numa_nodes(tmp_path) == {0: set(range(os.cpu_count() or 1))}


def test_this_machine() -> None:
    assert topology.numa_nodes()
    topology.node_of_process()
