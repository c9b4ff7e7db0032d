"""Where the daemon listens for requests, and the conditions for that."""

from __future__ import annotations

import os
import socket
import stat
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from kvxfer.errors import UsageError, invalid

API_SOCKET: Final = "api.sock"
DEFAULT_LISTEN: Final = "127.0.0.1:7380"


@dataclass(frozen=True, slots=True)
class Tls:
    """Files of certificates.

    Attributes
    ----------
    certificate, key
        Of the daemon, in PEM; the certificate's file also has those that lead to its root.
    client_ca
        If set, clients need a certificate of this CA. A client that sends no token gets the role of the token
        that stands for its certificate.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None


def parse_listen(listen: str) -> tuple[str, int]:
    """Reads ``"host:port"`` or ``"[v6]:port"``.

    Raises
    ------
    UsageError
        ``invalid-argument``.
    """
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise invalid(f'--listen is {listen!r}: write "host:port", or "" for only the unix socket')
    return host, int(port)


def require_safe(host: str, tls: Tls | None) -> None:
    """Refuses to listen for other hosts without TLS, because tokens could be read on the way.

    Raises
    ------
    UsageError
        ``invalid-argument``, with what to do.
    """
    if tls is not None or is_loopback(host):
        return
    raise invalid(
        f"on {host}, other hosts could reach this daemon without TLS: name --tls-certificate and "
        f"--tls-key, or listen on {DEFAULT_LISTEN}"
    )


def is_loopback(host: str) -> bool:
    """Whether only this host can reach an address; False for any name other than localhost."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen_tcp(host: str, port: int) -> socket.socket:
    """Returns a socket that listens.

    Raises
    ------
    UsageError
        ``system``, with the address in the message.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1024)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error}", code="system") from None
    return listener


def listen_unix(path: Path) -> socket.socket:
    """Returns a socket that listens at a path, for this user and root; replaces one that was left behind.

    The folder belongs to one daemon: `Attachments.start` holds its lock.

    Raises
    ------
    UsageError
        ``system``: the path is not a socket, or is too long.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen on {path}: {error}", code="system") from None
    return listener
