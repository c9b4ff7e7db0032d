"""The machine on which a result was measured, and the software that measured it."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import numpy as np

import kvxfer
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.stats import GIB, KIB

_GIT_TIMEOUT_S = 5.0


def describe(
    proc: Path = Path("/proc"), sys: Path = Path("/sys"), source: Path = Path(kvxfer.__file__).parent
) -> Message:
    """Returns the facts that a figure depends on, ready for JSON.

    What this machine does not tell is None (a governor inside most virtual machines, a commit outside
    a checkout). ``source`` is the folder of the package; its checkout names the commit.
    """
    cpu = _read(proc / "cpuinfo")
    return {
        "cpu": _field(cpu, "model name"),
        "cores": os.cpu_count(),
        # Fewer than the machine has under taskset or in a container.
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gib": _memory_gib(_read(proc / "meminfo")),
        "kernel": _read(proc / "sys/kernel/osrelease").strip() or None,
        "governor": _governor(sys / "devices/system/cpu"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "kvxfer": kvxfer.__version__,
        "commit": _commit(source),
    }


def in_words(machine: Message) -> str:
    """Returns the facts on one line, for the head of a table."""
    cores = f"{machine['cores']} cores"
    if machine["usable_cores"] != machine["cores"]:
        cores += f" ({machine['usable_cores']} usable)"
    version = f"kvxfer {machine['kvxfer']}"
    if machine["commit"]:
        version += f" at {machine['commit']}"
    parts = [
        machine["cpu"] or "unknown CPU",
        cores,
        f"{machine['memory_gib']:g} GiB" if machine["memory_gib"] else "",
        f"Linux {machine['kernel']}" if machine["kernel"] else "",
        f"governor {machine['governor']}" if machine["governor"] else "",
        f"Python {machine['python']}, numpy {machine['numpy']}",
        version,
    ]
    return ", ".join(part for part in parts if part)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _field(text: str, name: str) -> str | None:
    """Returns the first value of ``name : value`` lines."""
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return None


def _memory_gib(meminfo: str) -> float | None:
    total = (_field(meminfo, "MemTotal") or "").split()
    # Always "<number> kB", and the kernel's kB is 1024 bytes.
    return round(int(total[0]) * KIB / GIB, 1) if total and total[0].isdigit() else None


def _governor(cpus: Path) -> str | None:
    """Returns the frequency governors in use, usually one for all cores."""
    found = {_read(path).strip() for path in sorted(cpus.glob("cpu[0-9]*/cpufreq/scaling_governor"))}
    return ", ".join(sorted(found - {""})) or None


def _commit(source: Path) -> str | None:
    """Returns the checkout's commit, with ``-dirty`` when tracked files differ from it."""
    # An installed package may lie inside somebody else's checkout; ours has the package in git.
    if _git(source, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git(source, "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            # Reading must not take the lock of somebody who commits right now.
            ["git", "--no-optional-locks", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
