"""Limits of a process. A worker applies them to itself, by `Worker.do` or by its `first`.

`tests.fault.node` imports this module early, because a limited process could not import it later.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import resource
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvxfer import Agent, Pool

# On x86-64 and AArch64, which seccomp's filters distinguish by these constants of the kernel.
_PROCESS_VM_READV: Final = {"x86_64": (0xC000003E, 310), "aarch64": (0xC00000B7, 270)}
_INOTIFY_INIT1: Final = {"x86_64": (0xC000003E, 294), "aarch64": (0xC00000B7, 26)}
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
# linux/prctl.h, linux/seccomp.h, linux/capability.h
_PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 4, 8, 22, 38
_CAP_DAC_READ_SEARCH: Final = 2
_libc: Final = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def _prctl(option: int, *arguments: object) -> None:
    _call("prctl", option, *(*arguments, 0, 0, 0, 0)[:4])


def why_not(*within: str) -> str:
    """Returns why no process can be started by a command; "" where one was."""
    try:
        subprocess.run([*within, "true"], check=True, capture_output=True, text=True, timeout=200)
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip()
    except OSError as error:
        return str(error)
    return ""


def enter(pid: int) -> None:
    """Goes where another process is: into its namespaces of network and mounts. The folder stays."""
    folder = Path.cwd()
    process = os.pidfd_open(pid)
    _call("setns", process, _CLONE_NEWNET | _CLONE_NEWNS)
    os.close(process)
    os.chdir(folder)


def forbid_process_vm_readv() -> None:
    """Makes process_vm_readv fail with EPERM in all later threads, as a container's seccomp profile does."""
    _forbid(_PROCESS_VM_READV)


def forbid_inotify() -> None:
    """Forbids inotify in the same way: no file can be watched."""
    _forbid(_INOTIFY_INIT1)


def _forbid(call: Mapping[str, tuple[int, int]]) -> None:
    architecture, number = call[os.uname().machine]
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (0x20, 0, 0, 4),  # load the architecture
            (0x15, 0, 3, architecture),
            (0x20, 0, 0, 0),  # load the call's number
            (0x15, 0, 1, number),
            (0x06, 0, 0, 0x00050001),  # return EPERM
            (0x06, 0, 0, 0x7FFF0000),  # allow
        )
    )
    filters = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program) // 8, ctypes.addressof(filters)))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, 2, header)


def become(uid: int) -> None:
    """Changes the user of this process. It keeps only the right to read files, for imports."""
    permitted = int(Path("/proc/self/status").read_text().partition("CapPrm:")[2].split()[0], 16)
    _prctl(_PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    kept = permitted & 1 << _CAP_DAC_READ_SEARCH
    _call("capset", struct.pack("Ii", 0x20080522, 0), struct.pack("6I", kept, kept, 0, 0, 0, 0))
    # A user may inspect processes that were started as that user; this makes it so for this process.
    _prctl(_PR_SET_DUMPABLE, 1)


def spare_descriptors(number: int) -> None:
    """Leaves only `number` descriptors that can still be opened."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The limit bounds descriptor numbers, and there may be free numbers below used ones.
    free = (fd for fd in range(most) if not _is_open(fd))
    bound = next(itertools.islice(free, number, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (bound, most))


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def enough_descriptors() -> None:
    """Restores the first limit of descriptors."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def spare_addresses(nbytes: int) -> None:
    """Limits what can be mapped from now on to `nbytes` more; -1 removes the limit."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    bound = nbytes if nbytes < 0 else pages * resource.getpagesize() + nbytes
    resource.setrlimit(resource.RLIMIT_AS, (bound, resource.RLIM_INFINITY))


def make(*pools_nbytes: int) -> None:
    """Makes pools, and then an agent."""
    kept = [Pool(1, nbytes, huge_pages=False) for nbytes in pools_nbytes]
    Agent("another").close()
    del kept
