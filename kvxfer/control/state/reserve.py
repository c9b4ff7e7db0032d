"""Room on the disk that only a few changes may use, so that they succeed although the disk is full."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

#: Room that must stay free beside the reserve: for the lines of some thousand changes that are in progress.
LEAST_FREE_NBYTES: Final = 1 << 20
#: Errors of a system call that say that the disk is full, for this user or for all.
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# SQLite's log grows to 4 MiB before it is written back. Small disks give less.
_SIZES: Final = tuple(mebibytes << 20 for mebibytes in (16, 8, 4, 2, 1))


class Reserve:
    """A file that takes room while other changes may be made, and gives it up to revoking and draining.

    Called by the event loop and by the store's thread; every method is one or two system calls.

    Parameters
    ----------
    path
        The file, in the folder that it stands for.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._says = ""
        self.is_held = False

    def __str__(self) -> str:
        """Why it is not held; ``""`` if it is."""
        return self._says

    def take(self) -> bool:
        """Takes the room if it is not held and the disk has it; returns whether it is held.

        A file that a killed daemon left counts, also on a disk that is full.
        """
        if not self.is_held:
            try:
                self.is_held = self._take()
            except OSError as error:
                self._says = str(error.strerror)
        return self.is_held

    def give(self) -> bool:
        """Gives the room up; returns whether there was any.

        The file keeps its length, which tells how much has to be free again before other changes are made:
        else these would use what is left of it.
        """
        self.is_held = False
        try:
            found = self._path.lstat()
            os.truncate(self._path, 0)
        except OSError:
            return False
        with suppress(OSError):
            os.truncate(self._path, found.st_size)
        return found.st_blocks > 0

    def _take(self) -> bool:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            found, room = os.fstat(file), os.fstatvfs(file)
            if found.st_size and found.st_blocks * 512 >= found.st_size:
                return True
            free = room.f_bavail * room.f_frsize
            sizes = (found.st_size,) if found.st_size else _SIZES
            for nbytes in sizes:
                if nbytes + LEAST_FREE_NBYTES <= free:
                    try:
                        os.posix_fallocate(file, 0, nbytes)
                        self._says = ""
                        return True
                    except OSError:
                        os.ftruncate(file, 0)
            if found.st_size:
                os.ftruncate(file, found.st_size)
            needed = (sizes[-1] + LEAST_FREE_NBYTES) >> 20
            self._says = f"{needed} MiB must be free"
            return False
        finally:
            os.close(file)
