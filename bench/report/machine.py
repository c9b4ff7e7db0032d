"""The machine on which a result was measured, and the software that measured it."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import numpy as np
import psutil

import kvxfer
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.stats import GIB

_GIT_TIMEOUT_S = 5.0


def describe(source: Path = Path(kvxfer.__file__).parent) -> Message:
    """Returns the facts that a figure depends on, ready for JSON.

    The commit is that of the checkout with the package ``source``, with ``-dirty`` where files differ from
    it; None elsewhere.
    """
    return {
        "cpu": _processor(Path("/proc/cpuinfo").read_text()),
        "cores": os.cpu_count(),
        # Fewer than the machine has under taskset or in a container.
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "kvxfer": kvxfer.__version__,
        "commit": _commit(source),
        "build": _build(),
    }


def in_words(machine: Message) -> str:
    """Returns the facts on one line, for the head of a table."""
    commit = f" at {machine['commit']}" if machine["commit"] else ""
    return (
        f"{machine['cpu'] or 'unknown CPU'}, {machine['usable_cores']} of {machine['cores']} cores, "
        f"{machine['memory_gib']:g} GiB, Linux {machine['kernel']}, Python {machine['python']}, "
        f"numpy {machine['numpy']}, kvxfer {machine['kvxfer']}{commit}, compiled by {machine['build']}"
    )


def _build() -> str:
    from kvxfer._native import BUILD  # without native modules a benchmark says so in a line

    return BUILD


def _processor(cpuinfo: str) -> str | None:
    """Returns the first processor's name; with its family and model, as one name may stand for several."""
    lines = (line.partition(":") for line in cpuinfo.partition("\n\n")[0].splitlines())
    told = {key.strip(): value.strip() for key, _, value in lines}
    numbers = f" (family {told['cpu family']}, model {told['model']})" if "cpu family" in told else ""
    return f"{told['model name']}{numbers}" if "model name" in told else None


def _commit(source: Path) -> str | None:
    # An installed package may lie inside somebody else's checkout; ours has the package in git.
    if _git(source, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git(source, "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12")


def _git(folder: Path, *arguments: str) -> str | None:
    # Reading must not take the lock of somebody who commits right now.
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
