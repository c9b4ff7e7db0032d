"""The address of a daemon, and the token or certificate for it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from kvxfer.address import is_without_scheme
from kvxfer.daemon_link.runtime_folder import runtime_folder
from kvxfer.errors import invalid

_URL: Final = "KVXFER_DAEMON_URL"
_TOKEN_FILE: Final = "KVXFER_TOKEN_FILE"
_CERTIFICATE_FILE: Final = "KVXFER_CERTIFICATE_FILE"
_KEY_FILE: Final = "KVXFER_KEY_FILE"


@dataclass(frozen=True, slots=True)
class DaemonAddress:
    """The address of a daemon's REST API.

    Attributes
    ----------
    url
        ``"http://host:port"``, or ``"https://..."``; over a unix socket ``"http://localhost"``.
    socket
        The unix socket's path; ``""`` for TCP.
    """

    url: str
    socket: str = ""

    def __str__(self) -> str:
        return f"unix:{self.socket}" if self.socket else self.url

    @classmethod
    def parse(cls, text: str | os.PathLike[str] | None = None) -> DaemonAddress:
        """Reads a URL, ``"unix:/path"``, or a path.

        Parameters
        ----------
        text
            None or ``""``: ``KVXFER_DAEMON_URL``, else the socket of this user's daemon. A folder's path
            stands for the socket in that folder.

        Raises
        ------
        UsageError
            ``invalid-argument``: it is none of these.
        """
        named = os.fspath(text) if text else os.environ.get(_URL, "")
        where = "" if text else f"{_URL}: "
        if not named:
            return cls("http://localhost", str(runtime_folder() / "api.sock"))
        if named.startswith("unix:") or "://" not in named:
            path = Path(named.removeprefix("unix:").removeprefix("//"))
            # It could also be a relative path.
            if is_without_scheme(named) and not named.startswith("unix:") and not path.exists():
                raise invalid(
                    f"{where}{named!r} does not name a daemon: write http://{named}, or https://{named}"
                )
            return cls("http://localhost", str(path / "api.sock" if path.is_dir() else path))
        parts = urlsplit(named)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise invalid(
                f"{where}{named!r} does not name a daemon: "
                'write "http://host:port", "https://..." or "unix:/path"'
            )
        if parts.username is not None or parts.password is not None:
            raise invalid(
                f"{where}a daemon's URL must not contain a password: "
                f"name a file with a token, or set {_TOKEN_FILE}"
            )
        return cls(named.rstrip("/"))


def token_of(file: str | os.PathLike[str] | None = None) -> str | None:
    """Returns the token in a file, by default the one that ``KVXFER_TOKEN_FILE`` names; None without a file.

    Raises
    ------
    UsageError
        ``invalid-argument``: the file cannot be read, or is empty.
    """
    path = os.fspath(file) if file else os.environ.get(_TOKEN_FILE, "")
    where = "" if file else f"{_TOKEN_FILE}: "
    if not path:
        return None
    try:
        token = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(f"{where}the token's file cannot be read: {error}") from None
    if not token.isascii() or not token.isprintable() or not token:
        raise invalid(f"{where}{path} does not contain a token")
    return token


def certificate_of() -> tuple[str, str] | None:
    """Returns the files of a certificate and its key that the environment names; None if it names none.

    ``KVXFER_CERTIFICATE_FILE`` alone is enough if it holds both.
    """
    certificate = os.environ.get(_CERTIFICATE_FILE, "")
    return (certificate, os.environ.get(_KEY_FILE) or certificate) if certificate else None
