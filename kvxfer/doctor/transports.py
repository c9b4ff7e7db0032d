"""Which transports carry pages on this machine, and what the others would find here."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from pathlib import Path

from kvxfer.doctor import libraries, trial
from kvxfer.doctor.devices import rdma_devices
from kvxfer.doctor.finding import Finding, State
from kvxfer.doctor.libraries import Library
from kvxfer.errors import UsageError
from kvxfer.gpu.availability import availability
from kvxfer.options import TRANSPORTS

SUBJECT = "transports"
#: Kinds of rails that this version does not have.
TO_COME = ("verbs", "ucx")

# transport -> what it is for, and what most often forbids it; of those that one process can try.
_WRITTEN = {
    "loopback": (
        "moves pages between agents of one process",
        "agents need memfd_create, eventfd, epoll and a listening socket: see what the message names",
    ),
    "shm": (
        "moves pages between processes of one host at memory speed: the destination copies out of the peer's "
        "pool, mapped read-only",
        "it needs memfds and abstract unix sockets: a seccomp profile or a sandbox (gVisor) may forbid them; "
        "run without it, e.g. docker run --security-opt seccomp=unconfined",
    ),
    "unix": (
        "carries on one host what shm cannot reach: an engine's own memory where process_vm_readv is "
        "forbidden",
        "it needs abstract unix sockets: see what the message names",
    ),
    "tcp": (
        "moves pages between hosts, and within one where the others cannot",
        "bring the loopback interface up: ip link set lo up",
    ),
}


def check_names(names: tuple[str, ...]) -> None:
    """Raises `UsageError` for a name that is no transport."""
    known = (*TRANSPORTS, *TO_COME)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(
            f"unknown transport {', '.join(map(repr, unknown))}; known are {', '.join(known)}",
            code="invalid-argument",
        )


def examine(root: Path, required: tuple[str, ...] = ()) -> list[Finding]:
    """Tries every transport of host memory, and looks for what the others need.

    Parameters
    ----------
    root
        Where ``proc`` and ``sys`` are. The trials are of this machine whatever it is.
    required
        Transports without which the answer is `State.BLOCKS`.
    """
    assert {*_WRITTEN, "cuda_ipc"} == set(TRANSPORTS)
    lacking = {name: State.BLOCKS if name in required else State.LIMITS for name in (*TRANSPORTS, *TO_COME)}
    findings = [_written(name, lacking[name]) for name in _WRITTEN]
    # Where no agent can move a page by any means, that was asked for whatever was required.
    if all(finding.state is not State.GOOD for finding in findings):
        findings = [replace(finding, state=State.BLOCKS) for finding in findings]
    return [*findings, _cuda_ipc(lacking["cuda_ipc"]), *_to_come(root, lacking)]


def _written(name: str, lacking: State) -> Finding:
    why, change = _WRITTEN[name]
    if failure := trial.try_transport(name):
        return Finding(SUBJECT, name, lacking, f"does not work here: {failure}", why, change)
    pages = f"{trial.NUM_PAGES} pages of {trial.PAGE_NBYTES // 1024} KiB"
    found = f"works: two agents moved {pages}, every byte checked"
    return Finding(SUBJECT, name, State.GOOD, found, why)


def _cuda_ipc(lacking: State) -> Finding:
    why = (
        "moves pages between caches on GPUs of one host, for agents that name it among their transports; "
        "they stage their GPU's pages for tcp and unix, too, and an agent without it refuses tensors on a GPU"
    )
    able = availability()
    if able.device is not None and able.usable:
        # A process cannot open its own memory's handles, as a peer does.
        found = f"kernels can run on {able.device.name}; pages were not moved, which takes two processes"
        return Finding(SUBJECT, "cuda_ipc", State.NOTE, found, why)
    found = f"GPU kernels cannot run here: {able.missing}"
    # Not having a GPU limits nobody who did not ask for one.
    state = lacking if lacking is State.BLOCKS else State.NOTE
    return Finding(SUBJECT, "cuda_ipc", state, found, why, able.change)


def _to_come(root: Path, lacking: dict[str, State]) -> list[Finding]:
    devices = rdma_devices(root)
    return [
        _absent(
            "verbs",
            lacking["verbs"],
            f"{_count(len(devices), 'RDMA device')}, {libraries.ibverbs()}",
            "RDMA would read pages of another host without its CPU; until then they go over tcp",
        ),
        _absent(
            "ucx",
            lacking["ucx"],
            str(_find_ucp()),
            "UCX would bring the fabrics that verbs does not cover; until then pages go over tcp",
        ),
    ]


def _absent(name: str, state: State, offers: str, why: str) -> Finding:
    # Not having what nobody can have limits nobody who did not ask for it.
    asked = state is State.BLOCKS
    return Finding(
        SUBJECT,
        name,
        state if asked else State.NOTE,
        f"no agent of this version has it; this machine would offer: {offers}",
        why,
        f"take {name} out of what is required, or wait for a version that has it" if asked else "",
    )


def _find_ucp() -> Library:
    folders = []
    for wheel in ("libucx-cu13", "libucx-cu12"):
        try:
            folders.append(Path(str(importlib.metadata.distribution(wheel).locate_file("libucx/lib"))))
        except importlib.metadata.PackageNotFoundError:
            continue
    return libraries.ucp(folders)


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"
