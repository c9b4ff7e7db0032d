"""Folders and files that only this user may have made or changed."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path


def own_folder(folder: Path, mode: int = 0o700) -> None:
    """Makes a folder, or checks that the existing one belongs to this user; then sets its mode.

    Raises
    ------
    OSError
        It cannot be made.
    PermissionError, NotADirectoryError
        It belongs to another user, others may write to it, or it is not a directory, e.g. a link.
    """
    with suppress(FileExistsError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{folder} is not a directory")
    _require_own(folder, found)
    folder.chmod(mode)


def require_own_file(path: Path) -> None:
    """Checks a file if it is there: what another user has put there is not read.

    Raises
    ------
    PermissionError
        It belongs to another user, others may write to it, or it is not a plain file, e.g. a link.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode):
        kind = "a link" if stat.S_ISLNK(found.st_mode) else "no plain file"
        raise PermissionError(f"{path} is {kind}: remove it, or name another folder")
    _require_own(path, found)


def _require_own(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"{path} belongs to user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}: it must "
            f"belong to this user ({os.geteuid()}), and only this user may write to it"
        )
