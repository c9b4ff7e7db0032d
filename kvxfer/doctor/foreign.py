"""Whether a process may read another's memory, as shm does for memory outside a pool."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from pathlib import Path

from kvxfer.doctor.files import read_fields, read_int
from kvxfer.doctor.finding import Finding, State

SUBJECT = "foreign memory"

_PR_GET_DUMPABLE = 3
_CAP_SYS_PTRACE = 19
_PROBE_TIMEOUT_S = 10.0
_PROBE_NBYTES = 16
_NOT_TRIED = "not tried"

# Run by the child, which reads its parent and not the other way round: Yama permits every process to read its
# own children, but engines are not each other's children.
_CHILD = """
import ctypes, sys
class iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]
pid, address, nbytes = map(int, sys.argv[1:])
buffer = ctypes.create_string_buffer(nbytes)
local, remote = iovec(ctypes.addressof(buffer), nbytes), iovec(address, nbytes)
call = ctypes.CDLL(None, use_errno=True).process_vm_readv
call.restype = ctypes.c_ssize_t
word, pointer = ctypes.c_ulong, ctypes.c_void_p
call.argtypes = [ctypes.c_int, pointer, word, pointer, word, word]
moved = call(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
print(moved, ctypes.get_errno(), buffer.raw.hex())
"""

_WHY = (
    "shm copies pages straight out of an engine's own tensors by process_vm_readv; without it they go "
    "through a unix socket, with a second copy. Pools do not need it"
)
_SCOPES = {
    0: "any process of the same user may be read",
    1: "only ancestors may read a process",
    2: "only processes with CAP_SYS_PTRACE may read others",
    3: "no process may read another until the next boot",
}


def examine(root: Path) -> list[Finding]:
    """Tries to read another process's memory, and names the settings that permit or forbid it."""
    return [readv(), yama(root), process(root)]


def readv() -> Finding:
    """Lets a child read memory of this process, as two engines of one user would."""
    failure, number = _try_readv()
    if not failure:
        found = f"works: a child process of user {os.geteuid()} read {_PROBE_NBYTES} bytes of this one"
        return Finding(SUBJECT, "process_vm_readv", State.GOOD, found, _WHY)
    changes = {
        errno.EPERM: "give the engines CAP_SYS_PTRACE (docker run --cap-add SYS_PTRACE), or see Yama "
        "and this process under foreign memory",
        errno.ENOSYS: "use a kernel with CONFIG_CROSS_MEMORY_ATTACH, or a container runtime that allows "
        "process_vm_readv",
    }
    change = changes.get(number, "put the cache in a kvxfer.Pool, which does not need this right")
    state = State.NOTE if failure.startswith(_NOT_TRIED) else State.LIMITS
    return Finding(SUBJECT, "process_vm_readv", state, failure, _WHY, change)


def _try_readv() -> tuple[str, int]:
    """Returns what failed and its errno; ``("", 0)`` for nothing."""
    expected = os.urandom(_PROBE_NBYTES)
    buffer = ctypes.create_string_buffer(expected, _PROBE_NBYTES)
    command = [sys.executable, "-I", "-S", "-c", _CHILD]
    numbers = [str(number) for number in (os.getpid(), ctypes.addressof(buffer), _PROBE_NBYTES)]
    try:
        done = subprocess.run(
            [*command, *numbers],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
        moved, number, found = done.stdout.split()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return f"{_NOT_TRIED}: the child process did not answer ({error})", 0
    if int(moved) < 0:
        name = errno.errorcode.get(int(number), number)
        return f"refused: {os.strerror(int(number))} ({name}), tried by a child of the same user", int(number)
    if bytes.fromhex(found) != expected:
        return "the child process read wrong bytes: a sandbox emulates the call", 0
    return "", 0


def yama(root: Path) -> Finding:
    """Reads Yama's ``ptrace_scope``, which restricts reading among processes of one user."""
    name, file = "Yama", root / "proc/sys/kernel/yama/ptrace_scope"
    scope = read_int(file)
    if scope is None:
        found = "no ptrace_scope: this kernel does not restrict reading among processes of one user"
        return Finding(SUBJECT, name, State.GOOD, found, _WHY)
    found = f"ptrace_scope is {scope}: {_SCOPES.get(scope, 'a value that this version does not know')}"
    if scope == 0:
        return Finding(SUBJECT, name, State.GOOD, found, _WHY)
    if scope in (1, 2) and _has_ptrace(root):
        return Finding(SUBJECT, name, State.GOOD, f"{found}; this process has CAP_SYS_PTRACE", _WHY)
    change = "sysctl -w kernel.yama.ptrace_scope=0, or give the engines CAP_SYS_PTRACE"
    if scope == 3:
        change = (
            "boot with kernel.yama.ptrace_scope below 3 in /etc/sysctl.d: it cannot be lowered without a "
            "reboot"
        )
    return Finding(SUBJECT, name, State.LIMITS, found, _WHY, change)


def process(root: Path) -> Finding:
    """Says which properties of this process permit others to read it: its user, dumpable, capabilities."""
    fields = read_fields(root / "proc/self/status")
    uids = fields.get("Uid", "").split()
    dumpable = _dumpable()
    words = [
        f"user {uids[1] if len(uids) > 1 else os.geteuid()}",
        "dumpable" if dumpable == 1 else f"not dumpable ({dumpable})",
        "has CAP_SYS_PTRACE" if _has_ptrace(root) else "has no CAP_SYS_PTRACE",
    ]
    why = "a process may read another if both have one user and the other is dumpable, or with CAP_SYS_PTRACE"
    if dumpable == 1:
        return Finding(SUBJECT, "this process", State.GOOD, ", ".join(words), why)
    change = (
        "start engines without file capabilities or set-uid bits (they make a process undumpable), or "
        "call prctl(PR_SET_DUMPABLE, 1)"
    )
    return Finding(SUBJECT, "this process", State.LIMITS, ", ".join(words), why, change)


def _has_ptrace(root: Path) -> bool:
    try:
        effective = int(read_fields(root / "proc/self/status").get("CapEff", "0"), 16)
    except ValueError:
        return False
    return bool(effective >> _CAP_SYS_PTRACE & 1)


def _dumpable() -> int:
    return int(ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0))
