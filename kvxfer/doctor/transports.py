"""Which transports carry pages on this machine, and what the others would find here."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from pathlib import Path

from kvxfer.doctor import libraries, trial
from kvxfer.doctor.devices import gpus, rdma_devices
from kvxfer.doctor.finding import Finding, State
from kvxfer.doctor.libraries import Library
from kvxfer.errors import UsageError
from kvxfer.options import TRANSPORTS

SUBJECT = "transports"
#: Kinds of rails that this version does not have.
TO_COME = ("verbs", "ucx", "cuda_ipc")

# transport -> what it is for, and what most often forbids it.
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
    known = (*_WRITTEN, *TO_COME)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(
            f"unknown transport {', '.join(map(repr, unknown))}; known are {', '.join(known)}",
            code="invalid-argument",
        )


def examine(root: Path, required: tuple[str, ...] = ()) -> list[Finding]:
    """Tries every transport that is written, and looks for what the others need.

    Parameters
    ----------
    root
        Where ``proc`` and ``sys`` are. The trials are of this machine whatever it is.
    required
        Transports without which the answer is `State.BLOCKS`.
    """
    assert set(_WRITTEN) == set(TRANSPORTS)
    lacking = {name: State.BLOCKS if name in required else State.LIMITS for name in (*_WRITTEN, *TO_COME)}
    findings = [_written(name, lacking[name]) for name in _WRITTEN]
    # Where no agent can move a page by any means, that was asked for whatever was required.
    if all(finding.state is not State.GOOD for finding in findings):
        findings = [replace(finding, state=State.BLOCKS) for finding in findings]
    return [*findings, *_to_come(root, lacking)]


def _written(name: str, lacking: State) -> Finding:
    why, change = _WRITTEN[name]
    if failure := trial.try_transport(name):
        return Finding(SUBJECT, name, lacking, f"does not work here: {failure}", why, change)
    pages = f"{trial.NUM_PAGES} pages of {trial.PAGE_NBYTES // 1024} KiB"
    found = f"works: two agents moved {pages}, every byte checked"
    return Finding(SUBJECT, name, State.GOOD, found, why)


def _to_come(root: Path, lacking: dict[str, State]) -> list[Finding]:
    devices, cards = rdma_devices(root), gpus(root)
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
        _absent(
            "cuda_ipc",
            lacking["cuda_ipc"],
            f"{_count(len(cards), 'NVIDIA GPU')}, {libraries.cuda()}",
            "GPUs of one host would copy from each other, by kernels that are there already (see devices); "
            "until then an agent registers host memory alone and refuses tensors on a device",
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
