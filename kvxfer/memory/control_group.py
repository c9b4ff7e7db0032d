"""Memory and CPU time: the machine's, and the limits of this process's control groups (versions 2 and 1)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
# Version 1 writes "no limit" as the largest multiple of a page in 63 bits.
_UNLIMITED_NBYTES = 1 << 62


def memory_limit_nbytes(root: Path = _ROOT) -> tuple[int, str] | None:
    """Returns the tightest memory limit and its file; None without a limit."""
    limits = []
    for file in _files(root, "memory", ("memory.max", "memory.limit_in_bytes")):
        text = _text(file)  # "max" is no number
        if text.isdecimal() and int(text) < _UNLIMITED_NBYTES:
            limits.append((int(text), str(file)))
    return min(limits, default=None)


def machine_nbytes(root: Path = _ROOT) -> dict[str, int]:
    """Returns the machine's memory: ``MemTotal``, ``SwapTotal`` and others of /proc/meminfo in KiB there."""
    fields = (line.split() for line in _text(root / "proc/meminfo").splitlines())
    return {field[0].rstrip(":"): int(field[1]) * 1024 for field in fields if field[-1] == "kB"}


def free_huge_nbytes(root: Path = _ROOT) -> int:
    """Returns the free bytes in reserved huge pages of 2 MiB, which pools use first."""
    free = _text(root / "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    return int(free) * 2 * 1024 * 1024 if free.isdecimal() else 0


def cpu_limit_cores(root: Path) -> tuple[float, str] | None:
    """Returns the CPU limit in cores and its file; None without a limit."""
    limits = []
    for file in _files(root, "cpu", ("cpu.max", "cpu.cfs_quota_us")):
        quota, _, period = _text(file).partition(" ")
        if file.name == "cpu.cfs_quota_us":
            period = _text(file.with_name("cpu.cfs_period_us"))
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:  # neither "max" nor "-1"
            limits.append((int(quota) / int(period), str(file)))
    return min(limits, default=None)


def _files(root: Path, controller: str, names: tuple[str, str]) -> Iterator[Path]:
    """Yields the files that may hold a limit, for this process's group and all groups above it."""
    v2, v1 = names
    mount = root / "sys/fs/cgroup"
    # In a container the root of the mount is the container's own group, regardless of /proc.
    paths = {(v2, mount, ""), (v2, mount / "unified", ""), (v1, mount / controller, "")}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            paths |= {(v2, mount, path), (v2, mount / "unified", path)}
        elif controller in controllers.split(","):
            paths |= {(v1, mount / controller, path), (v1, mount / controllers, path)}
    seen = set()
    for name, base, path in sorted(paths, key=str):
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            file = base.joinpath(*parts[:depth], name)
            if file not in seen:
                seen.add(file)
                yield file


def _text(path: Path) -> str:
    """Returns the text without surrounding blanks, or none if the file cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
