"""Where the daemon listens for requests, and what has to be there for that."""

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
        Of the daemon, in PEM; the certificate with those that lead to its root.
    client_ca
        Where it is given, clients need a certificate of it. Who sends no token has the role of the token that
        is for the certificate.
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
        raise invalid(f'--listen is {listen!r}: write "host:port", or "" for the unix socket alone')
    return host, int(port)


def require_safe(host: str, tls: Tls | None) -> None:
    """Refuses to be reached from other hosts without TLS: tokens would be read on the way.

    Raises
    ------
    UsageError
        ``invalid-argument``, with what to do.
    """
    if tls is not None or is_loopback(host):
        return
    raise invalid(
        f"listening on {host}, other hosts would reach this daemon without TLS: name --tls-certificate and "
        f"--tls-key, or listen on {DEFAULT_LISTEN}"
    )


def is_loopback(host: str) -> bool:
    """Whether this host alone reaches an address; of a name but localhost that is not known."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen_tcp(host: str, port: int) -> socket.socket:
    """Returns a socket that listens.

    Raises
    ------
    UsageError
        ``system``, with the address in its words.
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
        raise UsageError(f"{host}:{port} cannot be listened on: {error}", code="system") from None
    return listener


def listen_unix(path: Path) -> socket.socket:
    """Returns a socket that listens at a path, for this user and root; it replaces one that is left there.

    The folder belongs to one daemon: `Attachments.start` holds its lock.

    Raises
    ------
    UsageError
        ``system``: the path is something else, or too long.
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
        raise UsageError(f"{path} cannot be listened on: {error}", code="system") from None
    return listener
