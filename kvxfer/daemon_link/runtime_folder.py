"""The folder of the node daemon's sockets."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from kvxfer.errors import invalid

#: Name of the daemon's socket in its folder.
SOCKET_NAME: Final = "agents.sock"
_OF_ROOT: Final = Path("/run/kvxfer")
# sockaddr_un has 108 bytes, the last of them zero.
_MAX_PATH_NBYTES: Final = 107


def runtime_folder() -> Path:
    """Returns the runtime folder of this user's daemon, whether it exists or not.

    It is ``KVXFER_DAEMON_DIR``, else ``kvxfer`` in ``XDG_RUNTIME_DIR`` if that is a directory of this user,
    else ``/run/kvxfer`` for root and ``/tmp/kvxfer-<uid>`` for other users.

    Raises
    ------
    UsageError
        ``invalid-argument``: the variable is empty, or not an absolute path.
    """
    named = os.environ.get("KVXFER_DAEMON_DIR")
    if named is not None:
        if not (folder := Path(named)).is_absolute():
            raise invalid(
                f"KVXFER_DAEMON_DIR is {named!r}, but must be an absolute path: set it, or unset it"
            )
        return folder
    uid = os.geteuid()
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if runtime.is_absolute() and runtime.is_dir() and runtime.stat().st_uid == uid:
        return runtime / "kvxfer"
    return _OF_ROOT if uid == 0 else Path(f"/tmp/kvxfer-{uid}")


def socket_of(named: str | None) -> Path | None:
    """Returns the socket at which an agent calls its daemon; None for no daemon.

    Parameters
    ----------
    named
        `AgentOptions.daemon`. A named socket is used whether it exists yet or not. None finds an existing
        socket: in this user's runtime folder, or in root's. With None, an empty ``KVXFER_DAEMON_DIR`` means
        no daemon.

    Raises
    ------
    UsageError
        ``invalid-argument``: the path is not possible for a socket.
    """
    if named == "":
        return None
    if named is not None:
        path = Path(named)
        return checked(path if path.suffix == ".sock" else path / SOCKET_NAME)
    if os.environ.get("KVXFER_DAEMON_DIR") == "":
        return None
    for path in dict.fromkeys((runtime_folder() / SOCKET_NAME, _OF_ROOT / SOCKET_NAME)):
        try:
            if stat.S_ISSOCK(path.stat().st_mode):
                return checked(path)
        except OSError:
            continue
    return None


def checked(path: Path) -> Path:
    """Returns the path of a socket, or raises `UsageError` if it is not valid or too long for one."""
    if not path.is_absolute() or len(os.fsencode(path)) > _MAX_PATH_NBYTES or "\0" in str(path):
        raise invalid(
            f"the daemon's socket is at {str(path)!r}, but must be at an absolute path of at most "
            f"{_MAX_PATH_NBYTES} bytes: set option daemon or KVXFER_DAEMON_DIR"
        )
    return path
