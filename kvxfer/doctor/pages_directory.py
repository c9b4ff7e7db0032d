"""A directory in which a daemon is to keep pages: whose it is, what it lies on, and whether I/O is direct."""

from __future__ import annotations

import ctypes
import mmap
import os
import shlex
import stat
import struct
import tempfile
from pathlib import Path

from kvxfer.doctor.files import binary_size, names_in, read_text
from kvxfer.doctor.finding import Finding, State

SUBJECT = "pages in files"

# native/store: pages and slots begin at multiples of it, and the smallest segment has 64 MiB.
_BLOCK_NBYTES = 4096
_SEGMENT_NBYTES = 64 << 20
_WORD = b"kvxfer probe    "
# <linux/stat.h>: of struct statx the mask comes first, then, much later, two alignments. Linux 6.1.
_STATX_DIOALIGN = 0x2000
_STATX_NBYTES = 256
_ALIGNMENTS_AT = 152
_AT_EMPTY_PATH = 0x1000
_NAME_A_DISK = "name a directory on a local disk (in a container, one of a volume)"
# What a file system of this type is instead of a disk of this host.
_NO_DISK = {
    **dict.fromkeys(
        ("tmpfs", "ramfs", "hugetlbfs"), "memory, which a pool uses better, and which a reboot clears"
    ),
    **dict.fromkeys(("overlay", "aufs"), "a container's own layer, which goes with the container"),
    **dict.fromkeys(
        ("nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "glusterfs", "lustre", "gpfs", "afs"),
        "a server's, which may answer after seconds",
    ),
}


def examine(directory: Path, root: Path) -> list[Finding]:
    """Examines a directory; if it is not there, the one in which the daemon would make it."""
    findings, place = [ownership(directory)], directory if directory.exists() else directory.parent
    if place.is_dir():
        findings += [file_system(place, root), direct(place), room(place)]
    return findings


def ownership(directory: Path) -> Finding:
    """Says whether the directory is this user's alone, or can be made."""
    why = "the files hold pages of all tenants, so the daemon refuses a directory that others may enter"
    name, quoted, user = "directory", shlex.quote(str(directory)), os.geteuid()

    def finding(state: State, found: str, change: str = "") -> Finding:
        return Finding(SUBJECT, name, state, f"{directory} {found}", why, change)

    try:
        status = directory.stat()
    except FileNotFoundError:
        if directory.parent.is_dir() and os.access(directory.parent, os.W_OK | os.X_OK):
            return finding(State.GOOD, "is not there; the daemon makes it for its user alone")
        make = f"as root: install -d -m 700 -o {user} {quoted}"
        return finding(State.BLOCKS, f"is not there, and user {user} cannot make it", make)
    except OSError as error:
        return finding(
            State.BLOCKS, f"cannot be examined: {error.strerror}", "let this user enter the folders above it"
        )
    if not stat.S_ISDIR(status.st_mode):
        return finding(State.BLOCKS, "is not a directory", "name a directory")
    mode = stat.S_IMODE(status.st_mode)
    found = f"belongs to user {status.st_uid}, mode {mode:04o}"
    changes = []
    if status.st_uid != user:
        changes.append(f"run the daemon as user {status.st_uid}, or chown {user} {quoted}")
    if mode & 0o077 or mode & 0o700 != 0o700:
        changes.append(f"chmod 700 {quoted}")
    if changes and _is_of_others(directory):
        # Such as /tmp: programs would miss what such a command takes from them.
        changes = [f"name a new directory in it, which the daemon makes: {quoted}/kvxfer-pages"]
    if changes:
        return finding(State.BLOCKS, f"{found}; this is user {user}", "; ".join(changes))
    return finding(State.GOOD, found)


def file_system(directory: Path, root: Path) -> Finding:
    """Says which file system a directory lies on."""
    why = (
        "pages in files are for a disk of this host, which keeps them over a restart and is read in parallel"
    )
    kind, source = _mounted(directory, root)
    if not kind:
        return Finding(
            SUBJECT, "file system", State.NOTE, "unknown: /proc/self/mountinfo cannot be read", why
        )
    found = f"{kind} on {source}"
    if kind in _NO_DISK or kind.startswith("fuse"):
        found += f": {_NO_DISK.get(kind, 'served by a program')}"
        return Finding(SUBJECT, "file system", State.LIMITS, found, why, _NAME_A_DISK)
    return Finding(SUBJECT, "file system", State.GOOD, found, why)


def direct(directory: Path) -> Finding:
    """Writes a block by direct I/O and reads it back."""
    why = (
        "direct I/O brings pages from the disk into the pool without a copy; without it each page goes "
        "through the page cache, and takes memory from engines"
    )
    try:
        number, name = tempfile.mkstemp(prefix=".kvxfer-doctor-", dir=directory)
    except OSError as error:
        found = f"not tried: no file can be made in {directory}: {error.strerror} (errno {error.errno})"
        change = f"let user {os.geteuid()} make files in it, or {_NAME_A_DISK}"
        return Finding(SUBJECT, "direct I/O", State.BLOCKS, found, why, change)
    os.close(number)
    try:
        wrong, alignments = _try_direct(name)
    except OSError as error:
        found = f"does not work here: {error.strerror} (errno {error.errno})"
        return Finding(SUBJECT, "direct I/O", State.LIMITS, found, why, _NAME_A_DISK)
    finally:
        Path(name).unlink()
    if wrong:
        change = "do not keep pages on this disk before its log (dmesg) says why"
        return Finding(SUBJECT, "direct I/O", State.BLOCKS, wrong, why, change)
    found = f"works: {_BLOCK_NBYTES} bytes were written and came back"
    if alignments is not None:
        found += f"; memory at multiples of {alignments[0]}, offsets at multiples of {alignments[1]}"
    return Finding(SUBJECT, "direct I/O", State.GOOD, found, why)


def room(directory: Path) -> Finding:
    """Says how much room is left for this user."""
    system = os.statvfs(directory)
    size, free = system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize
    found = f"{binary_size(free)} free of {binary_size(size)}"
    why = "files of pages take their room when they are first used, at least 64 MiB at a time"
    if free < _SEGMENT_NBYTES:
        return Finding(SUBJECT, "room", State.LIMITS, found, why, f"free some space, or {_NAME_A_DISK}")
    return Finding(SUBJECT, "room", State.GOOD, found, why)


def _is_of_others(directory: Path) -> bool:
    """Whether a directory has files, and no pages."""
    names = names_in(directory)
    return bool(names) and "format" not in names


def _try_direct(file: str) -> tuple[str, tuple[int, int] | None]:
    """Returns what was wrong with the bytes, "" for nothing, and the alignments of memory and offsets."""
    number = os.open(file, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    try:
        # A mapping begins at a page, as the memory of a pool does.
        with mmap.mmap(-1, _BLOCK_NBYTES) as block:
            block[:] = _WORD * (_BLOCK_NBYTES // len(_WORD))
            expected = block[:]
            if os.pwritev(number, [block], 0) != _BLOCK_NBYTES:
                return "a block was written in part", None
            block[:] = bytes(_BLOCK_NBYTES)
            if os.preadv(number, [block], 0) != _BLOCK_NBYTES or block[:] != expected:
                return "a block did not come back as it was written", None
        return "", _alignments(number)
    finally:
        os.close(number)


def _alignments(number: int) -> tuple[int, int] | None:
    """Returns the alignments that direct I/O needs, of memory and offsets; None if nobody says them."""
    call = getattr(ctypes.CDLL(None), "statx", None)
    told = ctypes.create_string_buffer(_STATX_NBYTES)
    if call is None or call(number, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, told) != 0:
        return None
    (mask,) = struct.unpack_from("=I", told)
    found: tuple[int, int] = struct.unpack_from("=II", told, _ALIGNMENTS_AT)
    return found if mask & _STATX_DIOALIGN and all(found) else None


def _mounted(directory: Path, root: Path) -> tuple[str, str]:
    """Returns the type and the source of the file system that a directory is in; empty ones if unknown."""
    inside, found, depth = directory.resolve(), ("", ""), -1
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        # ID PARENT MAJOR:MINOR ROOT PLACE OPTIONS [FIELDS...] - TYPE SOURCE OPTIONS
        before, dash, after = line.partition(" - ")
        fields, kinds = before.split(" "), after.split(" ")
        if not dash or len(fields) < 5 or len(kinds) < 2:
            continue
        # Blanks in it are octal escapes.
        place = Path(os.fsdecode(fields[4].encode().decode("unicode_escape").encode("latin-1")))
        # Of several at one place the last is the one that is seen.
        if inside.is_relative_to(place) and len(place.parts) >= depth:
            found, depth = (kinds[0], kinds[1]), len(place.parts)
    return found
