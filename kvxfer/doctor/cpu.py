"""The processor: its model and instructions, how many cores this process has, and their NUMA nodes."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from kvxfer.doctor.files import read_fields
from kvxfer.doctor.finding import Finding, State
from kvxfer.memory import control_group, topology

SUBJECT = "processor"

# Instruction sets of the copy kernels, best first.
_COPY_FLAGS = ("avx512f", "avx2")
# One core for each of two processes that poll; with fewer they take turns.
_ENOUGH_CORES = 2


def model(root: Path) -> str:
    """Returns the processor's name, or the machine's architecture if the kernel gives no name."""
    return read_fields(root / "proc/cpuinfo").get("model name") or platform.machine() or "unknown"


def isa(root: Path) -> list[str]:
    """Returns the instruction sets of the copy kernels that this machine has."""
    flags = read_fields(root / "proc/cpuinfo").get("flags", "").split()
    return [flag for flag in _COPY_FLAGS if flag in flags]


def examine(root: Path) -> list[Finding]:
    """Reads the model, the cores that this process may use, and the NUMA nodes."""
    return [instructions(root), cores(root), numa(root)]


def instructions(root: Path) -> Finding:
    """Says which non-temporal copies this machine could run."""
    found = f"{model(root)} with {' and '.join(isa(root)) or 'neither AVX-512 nor AVX2'}"
    why = "with AVX-512 or AVX2, page copies bypass the cache; without them they are plain memcpy"
    state = State.GOOD if isa(root) else State.LIMITS
    change = (
        ""
        if isa(root)
        else "not possible on this processor; in a virtual machine, pass the host's CPU through"
    )
    return Finding(SUBJECT, "instructions", state, found, why, change)


def cores(root: Path) -> Finding:
    """Says how many cores this process may use."""
    allowed, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    found = f"{allowed} of {there} cores"
    why = "an agent has one progress thread; two processes that poll at once need a core each"
    quota = control_group.cpu_limit_cores(root)
    if quota is None:
        found += "; no control group limits their time"
    else:
        found += f"; the control group allows the time of {quota[0]:g} cores ({quota[1]})"
    if allowed < _ENOUGH_CORES:
        return Finding(
            SUBJECT, "cores", State.LIMITS, found, why, "let the process run on more (taskset, cpuset)"
        )
    if quota is not None and quota[0] < allowed:
        why += "; a group that has used up its time is stopped for the rest of the period, up to 100 ms"
        change = "raise the quota, or ask for whole cores: docker run --cpuset-cpus, Kubernetes' CPU manager"
        return Finding(SUBJECT, "cores", State.LIMITS, found, why, change)
    return Finding(SUBJECT, "cores", State.GOOD, found, why)


def numa(root: Path) -> Finding:
    """Says how many NUMA nodes there are, and whether this process runs on only one."""
    nodes = {node: cpus for node, cpus in topology.numa_nodes(root / "sys").items() if cpus}
    why = "a copy is slower when its memory belongs to another node"
    if len(nodes) <= 1:
        return Finding(SUBJECT, "NUMA", State.GOOD, "one node: all memory is local", why)
    here = topology.node_of_process(root / "sys")
    found = f"{len(nodes)} nodes"
    if here is not None:
        why += f". Make pools with Pool(..., numa_node={here})"
        return Finding(SUBJECT, "NUMA", State.GOOD, f"{found}; this process runs on node {here} only", why)
    first = min(nodes)
    change = (
        f"start each engine on one: numactl --cpunodebind={first} --membind={first}, and "
        "Pool(..., numa_node=kvxfer.memory.topology.node_of_process())"
    )
    return Finding(SUBJECT, "NUMA", State.LIMITS, f"{found}; this process may run on several", why, change)
