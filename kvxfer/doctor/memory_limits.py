"""Memory that peers can map, and the limits on memory, mappings and descriptors."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
from collections.abc import Callable
from pathlib import Path

from kvxfer.doctor.files import binary_size, read_fields, read_int, read_text
from kvxfer.doctor.finding import Finding, State
from kvxfer.memory import control_group

SUBJECT = "memory"

# <linux/fcntl.h>; Linux 5.1. The fcntl module of Python 3.11 does not name it.
_F_SEAL_FUTURE_WRITE = 0x0010
# 2048 = 256 peers x 6 descriptors (control, two rails, memfds, pid) + 512 for the engine itself.
_ENOUGH_DESCRIPTORS = 2048
# Linux's default. A pool takes three mappings, and so does a peer's pool; CUDA and torch take thousands.
_ENOUGH_MAPPINGS = 65530
_UNLIMITED = "unlimited"


def examine(root: Path) -> list[Finding]:
    """Tries the seals of a memfd, and reads the limits of this process and of its groups."""
    return [seals(), amount(root), shm_folder(root), locked(root), descriptors(root), mappings(root)]


def seals() -> Finding:
    """Makes a memfd, seals it as a pool does, and tries what the seals must prevent."""
    name = "memfd seals"
    why = (
        "a pool's memory is a sealed memfd: it cannot shrink while peers map it, and with "
        "F_SEAL_FUTURE_WRITE they cannot map it writable"
    )
    try:
        failures = _try_seals()
    except OSError as error:
        found = f"a memfd cannot be made or sealed: {error.strerror} (errno {error.errno})"
        change = "use Linux 5.1 or newer, and a container runtime that allows memfd_create"
        # An agent's own fences lie in a memfd, whatever the transport.
        return Finding(SUBJECT, name, State.BLOCKS, found, why, change)
    if failures:
        found = f"works, but {' and '.join(failures)}"
        return Finding(SUBJECT, name, State.LIMITS, found, why, "use Linux 5.1 or newer")
    found = "work: F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_FUTURE_WRITE were set, and each took effect"
    return Finding(SUBJECT, name, State.GOOD, found, why)


def _try_seals() -> list[str]:
    size_seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    descriptor = os.memfd_create("kvxfer-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, size_seals)
        failures = []
        for nbytes, words in ((0, "shrinking"), (2 * mmap.PAGESIZE, "growing")):
            if not _refused(lambda nbytes=nbytes: os.ftruncate(descriptor, nbytes)):  # type: ignore[misc]
                failures.append(f"{words} is not prevented")
        try:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return [*failures, "F_SEAL_FUTURE_WRITE is unknown here: a peer could map a pool writable"]
        if not _refused(lambda: mmap.mmap(descriptor, mmap.PAGESIZE, mmap.MAP_SHARED).close()):
            failures.append("F_SEAL_FUTURE_WRITE does not prevent a writable mapping")
        return failures
    finally:
        os.close(descriptor)


def _refused(attempt: Callable[[], None]) -> bool:
    try:
        attempt()
    except PermissionError:
        return True
    return False


def amount(root: Path) -> Finding:
    """Says how much memory there is, for the machine and for the groups of this process."""
    fields = read_fields(root / "proc/meminfo")
    sizes = {name: _kib(fields.get(name, "")) for name in ("MemTotal", "MemAvailable")}
    words = [
        f"{binary_size(nbytes)} {label}"
        for label, nbytes in (("in the machine", sizes["MemTotal"]), ("available", sizes["MemAvailable"]))
        if nbytes is not None
    ] or ["/proc/meminfo has no sizes"]
    why = (
        "a pool counts against the control group of the process that makes it; if it does not fit, "
        "making it fails or the process is killed (SIGKILL)"
    )
    limit = control_group.memory_limit_nbytes(root)
    if limit is None:
        return Finding(SUBJECT, "amount", State.GOOD, f"{', '.join(words)}; no control group limits it", why)
    nbytes, file = limit
    found = f"{', '.join(words)}; the control group allows {binary_size(nbytes)} ({file})"
    total = sizes["MemTotal"]
    if total is not None and nbytes >= total:
        return Finding(SUBJECT, "amount", State.GOOD, found, why)
    change = (
        "check that all pools and the engine fit into it, or raise it: docker run --memory, Kubernetes "
        "resources.limits.memory"
    )
    return Finding(SUBJECT, "amount", State.LIMITS, found, why, change)


def shm_folder(root: Path) -> Finding:
    """Says how large /dev/shm is, because readers expect it to matter."""
    why = (
        "kvxfer does not use it: pools are memfds, which the size of /dev/shm does not limit. Engines "
        "(torch, NCCL) may need it"
    )
    try:
        system = os.statvfs(root / "dev/shm")
    except OSError as error:
        return Finding(SUBJECT, "/dev/shm", State.NOTE, f"not there ({error.strerror})", why)
    size, free = (binary_size(blocks * system.f_frsize) for blocks in (system.f_blocks, system.f_bavail))
    return Finding(SUBJECT, "/dev/shm", State.NOTE, f"{size}, {free} free", why)


def locked(root: Path) -> Finding:
    """Says how much memory may be locked."""
    limit = _limit(root, "Max locked memory", resource.RLIMIT_MEMLOCK)
    found = f"RLIMIT_MEMLOCK is {limit if limit == _UNLIMITED else binary_size(int(limit))}"
    why = "the transport verbs locks every page that is registered with it; nothing else locks memory"
    change = "" if limit == _UNLIMITED else "for RDMA: ulimit -l unlimited, or docker run --ulimit memlock=-1"
    return Finding(SUBJECT, "locked memory", State.NOTE, found, why, change)


def descriptors(root: Path) -> Finding:
    """Says how many files this process may have open."""
    limit = _limit(root, "Max open files", resource.RLIMIT_NOFILE)
    found = f"RLIMIT_NOFILE is {limit}"
    why = (
        "a peer on this host takes up to 6 descriptors, one on another host its control socket and its "
        "rails; 256 peers and an engine need about 2048"
    )
    if limit == _UNLIMITED or int(limit) >= _ENOUGH_DESCRIPTORS:
        return Finding(SUBJECT, "open files", State.GOOD, found, why)
    change = "ulimit -n 65536, systemd LimitNOFILE=65536, or docker run --ulimit nofile=65536"
    return Finding(SUBJECT, "open files", State.LIMITS, found, why, change)


def mappings(root: Path) -> Finding:
    """Says how many mappings a process may have."""
    count = read_int(root / "proc/sys/vm/max_map_count")
    why = "each pool, own or a peer's, takes three mappings; torch and CUDA take thousands"
    if count is None:
        return Finding(SUBJECT, "mappings", State.NOTE, "vm.max_map_count cannot be read", why)
    found = f"vm.max_map_count is {count}"
    if count >= _ENOUGH_MAPPINGS:
        return Finding(SUBJECT, "mappings", State.GOOD, found, why)
    return Finding(SUBJECT, "mappings", State.LIMITS, found, why, "sysctl -w vm.max_map_count=262144")


def total_nbytes(root: Path) -> int | None:
    """Returns the machine's memory."""
    return _kib(read_fields(root / "proc/meminfo").get("MemTotal", ""))


def _kib(text: str) -> int | None:
    number = text.partition(" ")[0]
    return int(number) * 1024 if number.isdecimal() else None


def _limit(root: Path, name: str, number: int) -> str:
    """Returns a soft limit of this process as digits or ``"unlimited"``, from its file or from the kernel."""
    for line in (read_text(root / "proc/self/limits") or "").splitlines():
        if line.startswith(name):
            soft = line.removeprefix(name).split()[0]
            if soft.isdecimal() or soft == _UNLIMITED:
                return soft
    soft_limit = resource.getrlimit(number)[0]
    return _UNLIMITED if soft_limit == resource.RLIM_INFINITY else str(soft_limit)
