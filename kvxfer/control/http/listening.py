"""Where the daemon listens for requests, and the conditions for that."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import stat
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from kvxfer.errors import AgentError, invalid

API_SOCKET: Final = "api.sock"
DEFAULT_LISTEN: Final = "127.0.0.1:7380"
# Reasons of OpenSSL; the last one is for a key of another type.
_OF_ANOTHER_KEY: Final = frozenset({"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"})


@dataclass(frozen=True, slots=True)
class Tls:
    """Files of certificates, which the daemon reads again when they change.

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


def check_files(tls: Tls) -> None:
    """Reads the files of certificates as the server will, so that a bad one ends the start.

    Raises
    ------
    UsageError
        ``invalid-argument``, with the option, the file, and what is wrong.
    """
    certificate = _pem_of("--tls-certificate", tls.certificate)
    key = _pem_of("--tls-key", tls.key)
    _check_certificates("--tls-certificate", tls.certificate, certificate)
    if "ENCRYPTED" in key:
        raise invalid(f"--tls-key {tls.key} has a password: name a file with the key without a password")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.certificate, tls.key, password=str)
    except ssl.SSLError as error:
        if error.reason in _OF_ANOTHER_KEY:
            words = f"is not the key of --tls-certificate {tls.certificate}: name the key that belongs to it"
        else:
            words = f"does not hold a private key in PEM ({error.reason or error})"
        raise invalid(f"--tls-key {tls.key} {words}") from None
    if tls.client_ca is not None:
        authorities = _pem_of("--tls-client-ca", tls.client_ca)
        _check_certificates("--tls-client-ca", tls.client_ca, authorities)


def _pem_of(option: str, path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError as error:
        raise invalid(f"{option} {path} cannot be read: {error.strerror}") from None


def _check_certificates(option: str, path: Path, text: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        words = "does not hold a certificate in PEM"
        if "-----BEGIN CERTIFICATE-----" in text:
            words = f"holds a malformed certificate ({error.reason or error})"
        raise invalid(f"{option} {path} {words}") from None


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
    AgentError
        ``system``, with the option and the address in the message.
    """
    where = f"--listen {host}:{port}"
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
        if error.errno == errno.EADDRINUSE:
            words = f"{where} is in use: stop the other program, or choose another port"
        elif error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            words = f"{where} is not an address of this host ({error.strerror}): name one that is"
        else:
            words = f"{where} cannot be listened on: {error.strerror}"
        raise AgentError(words, code="system") from None
    return listener


def listen_unix(path: Path) -> socket.socket:
    """Returns a socket that listens at a path, for this user and root; replaces one that was left behind.

    The folder belongs to one daemon: `AgentLinks.start` holds its lock.

    Raises
    ------
    AgentError
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
        raise AgentError(f"cannot listen on {path}: {error}", code="system") from None
    return listener
