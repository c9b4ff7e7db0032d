"""The default secret, which all agents of one user on one host share."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path

from kvxfer.errors import AgentError, KvxferError, UsageError, invalid

SECRET_FILE = "secret"


def secret_folder() -> Path:
    """Returns its folder, which may not exist: ``kvxfer`` in the user's runtime directory, else in the cache.

    The folder is in ``XDG_RUNTIME_DIR`` if that is a directory of this user (``su`` leaves another user's),
    else in ``XDG_CACHE_HOME``, else in ``~/.cache``.

    Raises
    ------
    UsageError
        ``invalid-argument``: the environment names none of them.
    """
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if runtime.is_absolute() and runtime.is_dir() and runtime.stat().st_uid == os.geteuid():
        return runtime / "kvxfer"
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if cache.is_absolute():
        return cache / "kvxfer"
    try:
        return Path.home() / ".cache" / "kvxfer"
    except RuntimeError:
        raise _bad(
            "neither XDG_RUNTIME_DIR nor XDG_CACHE_HOME nor HOME names a folder for this user's own secret"
        ) from None


def user_secret() -> bytes:
    """Returns this user's secret, which is made on first use and only this user can read.

    Processes that make it at the same time end up with the same secret.

    Raises
    ------
    UsageError
        ``invalid-argument``: the folder or the file belongs to another user, other users may write to the
        folder or read the file, or the secret cannot be made. The message names the path and says what to do.
    AgentError
        ``system``: the process has no descriptors or memory left.
    """
    place = secret_folder()
    directory = _open(place, make=True)
    assert directory is not None
    try:
        return _read(directory, place / SECRET_FILE) or _make(directory, place / SECRET_FILE)
    finally:
        os.close(directory)


def existing_secret() -> bytes | None:
    """Returns this user's secret, or None if there is none yet; makes nothing.

    Raises
    ------
    UsageError
        As in `user_secret`.
    """
    place = secret_folder()
    directory = _open(place, make=False)
    if directory is None:
        return None
    try:
        return _read(directory, place / SECRET_FILE)
    finally:
        os.close(directory)


def _open(place: Path, *, make: bool) -> int | None:
    """Returns a descriptor of the folder, checked to be this user's; None if there is no folder."""
    try:
        if make:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.mkdir(mode=0o700, exist_ok=True)
        directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not make:
            return None
        raise _failed(f"{place} cannot hold this user's own secret", error) from None
    try:
        found = os.fstat(directory)
        if found.st_uid != os.geteuid():
            raise _bad(f"{place} cannot hold this user's own secret: it belongs to user {found.st_uid}")
        if stat.S_IMODE(found.st_mode) & 0o022:
            raise _bad(f"other users may write to {place}, which holds this user's secret: chmod 700 {place}")
    except BaseException:
        os.close(directory)
        raise
    return directory


def _read(directory: int, path: Path) -> bytes | None:
    """Returns the file's secret, or None if there is no file."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(SECRET_FILE, flags, dir_fd=directory)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _failed(f"{path} cannot be read", error) from None
    with os.fdopen(file, "rb") as opened:
        found = os.fstat(file)
        if found.st_uid != os.geteuid():
            raise _bad(f"{path} belongs to user {found.st_uid}: kvxfer reads only a file of this user")
        if not stat.S_ISREG(found.st_mode) or stat.S_IMODE(found.st_mode) & 0o077:
            raise _bad(f"other users may read {path}: delete it, and kvxfer makes a new secret (mode 0600)")
        secret = opened.read(4096).strip()
    if len(secret) < 32:
        raise _bad(f"{path} holds {len(secret)} bytes, not a secret: delete it, and kvxfer makes a new one")
    return secret


def _make(directory: int, path: Path) -> bytes:
    """Makes the file, and returns its secret: this process's, or that of another process that was faster."""
    own = f".{SECRET_FILE}-{secrets.token_hex(8)}"
    try:
        file = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
        try:
            with os.fdopen(file, "wb") as opened:
                opened.write(secrets.token_hex(32).encode() + b"\n")
            # The file appears whole or not at all, and never replaces another process's.
            os.link(own, SECRET_FILE, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
        except FileExistsError:
            pass  # another process was first: its secret is the one that both read
        finally:
            os.unlink(own, dir_fd=directory)
    except OSError as error:
        raise _failed(f"{path} cannot be made", error) from None
    secret = _read(directory, path)
    if secret is None:
        raise _bad(f"{path} was deleted while this process made it: try again")
    return secret


def _failed(message: str, error: OSError) -> KvxferError:
    message += f": {error.strerror}"
    # Another secret would not help a process that has no descriptor or memory left.
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return AgentError(message, code="system")
    return _bad(message)


def _bad(message: str) -> UsageError:
    return invalid(f"{message}; or give both agents a secret (secret= or KVXFER_SECRET_FILE)")
