"""Versions of kvxfer and of related software, without importing it."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import re
from pathlib import Path

import kvxfer
from kvxfer.doctor.files import read_text
from kvxfer.doctor.finding import Finding, State

SUBJECT = "software"

#: distribution -> how kvxfer uses it.
OTHERS = {
    "torch": "tensors are registered without a copy; those on a GPU need agents that name the transport "
    "cuda_ipc",
    "vllm": "kvxfer has a connector for it: kv_connector KvxferConnector in "
    "--kv-transfer-config (0.32, 0.33)",
    "sglang": "kvxfer has a connector for it: --disaggregation-transfer-backend kvxfer (0.5.23)",
}
# The first with MADV_POPULATE_WRITE and MADV_POPULATE_READ.
_GOOD_KERNEL = (5, 14)
# The first with F_SEAL_FUTURE_WRITE.
_LEAST_KERNEL = (5, 1)


def version_of(distribution: str) -> str | None:
    """Returns an installed distribution's version, or None."""
    try:
        return importlib.metadata.version(distribution)
    except Exception:
        return None  # absent, or with metadata that cannot be read


def kernel_release(root: Path) -> str:
    """Returns the kernel's release, e.g. ``"6.8.0-45-generic"``."""
    return read_text(root / "proc/sys/kernel/osrelease") or platform.release()


def copy_kernel() -> str:
    """Returns the copy that the native module chose, ``""`` if the module does not load.

    The module is imported by name, because it may be missing here; nothing of it is called.
    """
    try:
        return str(importlib.import_module("kvxfer._native").COPY_KERNEL)
    except (ImportError, AttributeError):
        return ""


def versions(root: Path) -> dict[str, str | None]:
    """Returns every version by name; None if it is not installed."""
    return {
        "kvxfer": kvxfer.__version__,
        "python": platform.python_version(),
        "numpy": version_of("numpy"),
        "kernel": kernel_release(root),
        "libc": " ".join(platform.libc_ver()).strip() or None,
        **{name: version_of(name) for name in OTHERS},
    }


def examine(root: Path) -> list[Finding]:
    """Says which versions are here, and whether the native module fits them."""
    known = versions(root)
    findings = [
        native_module(),
        Finding(
            SUBJECT,
            "Python",
            State.GOOD,
            f"{platform.python_implementation()} {known['python']}, numpy {known['numpy']}, {known['libc']}",
            "kvxfer runs on Python 3.11 to 3.13 with numpy 1.26 or newer",
        ),
        kernel(root),
    ]
    for name, why in OTHERS.items():
        found = known[name] or "not installed"
        findings.append(Finding(SUBJECT, name, State.NOTE, found, why))
    return findings


def native_module() -> Finding:
    """Says whether the native module loads, and which copy it chose."""
    why = "it moves all bytes, and chooses the fastest copy that the processor has when it loads"
    try:
        module = importlib.import_module("kvxfer._native")
        built, kernel_name = str(module.__version__), str(module.COPY_KERNEL)
    except (ImportError, AttributeError) as error:
        change = "install kvxfer again for this Python and processor: pip install --force-reinstall ."
        return Finding(
            SUBJECT, "kvxfer", State.BLOCKS, f"its native module does not load: {error}", why, change
        )
    found = f"{kvxfer.__version__}, copy kernel {kernel_name}"
    if built != kvxfer.__version__:
        found += f", but the native module is of version {built}"
        return Finding(SUBJECT, "kvxfer", State.LIMITS, found, why, "build it again: pip install .")
    if kernel_name == "memcpy":
        change = "not possible on this processor: non-temporal copies need AVX2 or AVX-512"
        return Finding(SUBJECT, "kvxfer", State.LIMITS, found, why, change)
    return Finding(SUBJECT, "kvxfer", State.GOOD, found, why)


def kernel(root: Path) -> Finding:
    """Says whether the kernel has what kvxfer uses."""
    release = kernel_release(root)
    why = (
        "since 5.14 one call faults in a pool (MADV_POPULATE_WRITE); since 5.1 peers cannot map pools "
        "writable (F_SEAL_FUTURE_WRITE)"
    )
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers is None:
        return Finding(SUBJECT, "Linux", State.NOTE, release or "unknown", why)
    version = (int(numbers[1]), int(numbers[2]))
    if version >= _GOOD_KERNEL:
        return Finding(SUBJECT, "Linux", State.GOOD, release, why)
    change = f"use Linux {_GOOD_KERNEL[0]}.{_GOOD_KERNEL[1]} or newer"
    if version < _LEAST_KERNEL:
        change += "; on this one a peer of the same user could write into pools"
    return Finding(SUBJECT, "Linux", State.LIMITS, release, why, change)
