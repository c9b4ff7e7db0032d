"""All findings of one machine, in order, and whether it is ready."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvxfer.doctor import (
    access,
    available_transports,
    container,
    cpu,
    devices,
    foreign,
    huge_page_supply,
    memory_limits,
    network,
    pages_directory,
    software,
)
from kvxfer.doctor.finding import Finding, Probe, State, run_probe
from kvxfer.memory import topology

ROOT = Path("/")


@dataclass(slots=True)
class Report:
    """What was found.

    Attributes
    ----------
    findings
        Findings of one subject are adjacent.
    machine
        Facts for comparing machines: names, counts, versions.
    peer
        Figures of a peer, if one was named (`kvxfer.doctor.peer_reach`).
    """

    findings: list[Finding]
    machine: dict[str, Any]
    peer: dict[str, Any] | None = field(default=None)

    @property
    def ok(self) -> bool:
        """Whether no finding blocks."""
        return all(finding.state is not State.BLOCKS for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON's types; ``peer`` is included if one was named."""
        shown: dict[str, Any] = {
            "findings": [finding.to_dict() for finding in self.findings],
            "ok": self.ok,
            "machine": self.machine,
        }
        if self.peer is not None:
            shown["peer"] = self.peer
        return shown


def examine(required: tuple[str, ...] = (), root: Path = ROOT, pages_folder: Path | None = None) -> Report:
    """Examines this machine; takes about a tenth of a second, with a GPU up to two, and changes nothing.

    Parameters
    ----------
    required
        Transports that must work.
    root
        Where ``proc``, ``sys`` and ``dev`` are. Trials (transports, seals, rights, a pool) always use this
        machine.
    pages_folder
        A directory in which a daemon is to keep pages: a block is written there, and removed again.

    Raises
    ------
    UsageError
        A required name is not a transport. Nothing else is raised: a failing probe is a finding.
    """
    available_transports.check_names(required)
    probes: dict[str, Probe] = {
        available_transports.SUBJECT: functools.partial(available_transports.examine, required=required),
        foreign.SUBJECT: foreign.examine,
        access.SUBJECT: access.examine,
        memory_limits.SUBJECT: memory_limits.examine,
        huge_page_supply.SUBJECT: huge_page_supply.examine,
        cpu.SUBJECT: cpu.examine,
        network.SUBJECT: network.examine,
        devices.SUBJECT: devices.examine,
        container.SUBJECT: container.examine,
        software.SUBJECT: software.examine,
    }
    if pages_folder is not None:
        probes[pages_directory.SUBJECT] = functools.partial(pages_directory.examine, pages_folder)
    findings = []
    for subject, probe in probes.items():
        findings += run_probe(subject, probe, root)
    return Report(findings, machine(root))


def machine(root: Path = ROOT) -> dict[str, Any]:
    """Returns the facts of a machine, as JSON's types; None for unknown ones."""
    facts: dict[str, Callable[[], Any]] = {
        "host": platform.node,
        "cpu": lambda: cpu.model(root),
        "isa": lambda: cpu.isa(root),
        "cores": lambda: len(os.sched_getaffinity(0)),
        "numa_nodes": lambda: len(topology.numa_nodes(root / "sys")),
        "memory_nbytes": lambda: memory_limits.total_nbytes(root),
        "nics": lambda: [nic.name for nic in network.nics(root) if nic.physical],
        "rdma_devices": lambda: devices.rdma_devices(root),
        "gpus": lambda: [gpu.model for gpu in devices.gpus(root)],
        "copy_kernel": software.copy_kernel,
        "versions": lambda: software.versions(root),
    }
    return {name: _fact(find) for name, find in facts.items()}


def _fact(find: Callable[[], Any]) -> Any:
    try:
        return find()
    except Exception:
        return None  # the finding of the same subject reports the cause
