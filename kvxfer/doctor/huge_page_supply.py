"""Huge pages: how many are reserved, whether the kernel makes them by itself, what a pool gets."""

from __future__ import annotations

from pathlib import Path

import kvxfer
from kvxfer.doctor.files import binary_size, chosen, names_in, read_int, read_text
from kvxfer.doctor.finding import Finding, State
from kvxfer.errors import KvxferError

SUBJECT = "huge pages"

# The size that pools ask for (native/core/system/pool_memory.cpp).
_POOL_PAGE_KIB = 2048
# Enough for huge pages, and too little to disturb other processes.
_TRIAL_NBYTES = 8 << 20
_WHY = (
    "with base pages, a pool's maker and every peer that maps it take a page fault for each 4 KiB, "
    "and copies take a TLB miss for each page"
)
_NOT_NEEDED = "the pool above got huge pages without it, so nothing is lost"


def examine(root: Path) -> list[Finding]:
    """Reads what is reserved and what is automatic, and makes a pool to see what it gets."""
    trial = pool()
    # Two ways lead to huge pages: if a pool uses one of them, the other is not a limit.
    lacking = State.NOTE if trial.state is State.GOOD else State.LIMITS
    return [trial, *reserved(root, lacking), *transparent(root, lacking)]


def pool() -> Finding:
    """Makes a small pool and says what kind of pages the kernel gave."""
    try:
        with kvxfer.Pool(_TRIAL_NBYTES // 4096, 4096, name="doctor-pages") as trial:
            kind, seals = trial.page_kind, ", ".join(trial.seals)
    except (KvxferError, ImportError) as error:
        found = f"a pool of {binary_size(_TRIAL_NBYTES)} cannot be made: {error}"
        change = "see the memory findings: a control group limits memory, or memfds are forbidden"
        return Finding(SUBJECT, "a pool", State.BLOCKS, found, "shm needs pools to be fast", change)
    found = f"a pool of {binary_size(_TRIAL_NBYTES)} got {kind} pages and the seals {seals}"
    if kind != "base":
        return Finding(SUBJECT, "a pool", State.GOOD, found, _WHY)
    change = (
        "reserve 2 MiB pages (sysctl -w vm.nr_hugepages=N, half as many as the pools have MiB), or "
        "use Linux 6.1 or newer, where pools request transparent huge pages themselves, or allow them "
        "for all shared memory: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    )
    return Finding(SUBJECT, "a pool", State.LIMITS, found, _WHY, change)


def reserved(root: Path, lacking: State = State.LIMITS) -> list[Finding]:
    """Reads how many huge pages of each size are reserved, by NUMA node where there are several."""
    folder = root / "sys/kernel/mm/hugepages"
    findings = []
    for name in names_in(folder):
        size = name.removeprefix("hugepages-").removesuffix("kB")
        if not size.isdecimal():
            continue
        count, free = (read_int(folder / name / file) for file in ("nr_hugepages", "free_hugepages"))
        found = f"{_known(count)} reserved, {_known(free)} free{_by_node(root, name)}"
        label = f"reserved, {binary_size(int(size) * 1024)}"
        if int(size) != _POOL_PAGE_KIB:
            why = "pools use 2 MiB pages only"
            findings.append(Finding(SUBJECT, label, State.NOTE, found, why))
        elif free:
            why = f"pools use these first, up to {binary_size(free * _POOL_PAGE_KIB * 1024)} in total"
            findings.append(Finding(SUBJECT, label, State.GOOD, found, why))
        else:
            change = "sysctl -w vm.nr_hugepages=N, half as many as the pools have MiB; best soon after boot"
            findings.append(_lacking(label, lacking, found, change))
    if not findings:
        found = "this kernel has none (/sys/kernel/mm/hugepages is missing or empty)"
        change = "allow transparent huge pages for pools, or use a kernel with CONFIG_HUGETLBFS"
        findings.append(_lacking("reserved", lacking, found, change))
    return findings


def _lacking(label: str, state: State, found: str, change: str) -> Finding:
    """Returns the finding for a missing way to huge pages; a note if a pool uses the other."""
    if state is State.NOTE:
        return Finding(SUBJECT, label, state, found, _NOT_NEEDED)
    return Finding(SUBJECT, label, state, found, _WHY, change)


def transparent(root: Path, lacking: State = State.LIMITS) -> list[Finding]:
    """Reads whether the kernel makes huge pages by itself, for pools and for an engine's own memory."""
    findings = []
    for file, label, takes, why in (
        ("shmem_enabled", "transparent, pools", ("always", "within_size", "advise", "force"), _WHY),
        (
            "enabled",
            "transparent, other memory",
            ("always", "madvise"),
            "process_vm_readv pins every page of an engine's own memory: fewer and larger ones cost less",
        ),
    ):
        text = read_text(root / "sys/kernel/mm/transparent_hugepage" / file)
        if text is None:
            found = "this kernel has no such setting"
            findings.append(Finding(SUBJECT, label, State.NOTE, found, why, "reserve huge pages instead"))
            continue
        setting = chosen(text)
        if setting in takes:
            findings.append(Finding(SUBJECT, label, State.GOOD, f"{file} is {setting}", why))
            continue
        found = f"{file} is {setting}"
        of_pools = file == "shmem_enabled"
        change = f"echo {'advise' if of_pools else 'madvise'} > /sys/kernel/mm/transparent_hugepage/{file}"
        if of_pools:
            findings.append(_lacking(label, lacking, found, change))
        else:
            findings.append(Finding(SUBJECT, label, State.LIMITS, found, why, change))
    return findings


def _by_node(root: Path, name: str) -> str:
    nodes = root / "sys/devices/system/node"
    counts = {
        node: read_int(nodes / node / "hugepages" / name / "free_hugepages")
        for node in names_in(nodes)
        if node.removeprefix("node").isdecimal()
    }
    if len(counts) < 2:
        return ""
    return f" ({', '.join(f'{node}: {_known(count)} free' for node, count in counts.items())})"


def _known(number: int | None) -> str:
    return "unknown" if number is None else str(number)
