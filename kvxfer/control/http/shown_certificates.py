"""When the daemon's own certificates expire, read from their files."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvxfer.log import logger

if TYPE_CHECKING:
    from kvxfer.control.http.rest_certificate import RestCertificate

_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
# Tags of DER: the version, which a certificate may leave out, and the older of the two forms of a time.
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
# Fields of a certificate, without its version: serial number, algorithm, issuer, validity.
_VALIDITY: Final = 3


class ShownCertificates:
    """The certificates that a daemon shows, and when they expire.

    Attributes
    ----------
    expires_at_s
        By use, in seconds since 1970: ``"rest"``, as new connections get it, and ``"agent"``, of the daemon's
        own agent. Both are read again when their files change. If a file holds a chain, the first of its
        certificates that expires counts. A use without a certificate is left out.
    """

    def __init__(self) -> None:
        self.expires_at_s: dict[str, float] = {}
        self._rest: RestCertificate | None = None
        self._rest_num_read = -1
        self._agent: Path | None = None
        self._is_reading = False
        self._complaints: dict[str, str] = {}

    async def add_rest(self, certificate: RestCertificate) -> None:
        """Reads the certificate for REST; `refresh` reads it again."""
        self._rest = certificate
        await self.refresh()

    async def add_agent(self, certificate: Path) -> None:
        """Reads the certificate of the daemon's own agent; `refresh` reads it again."""
        self._agent = certificate
        await self.refresh()

    async def refresh(self) -> None:
        """Reads again what may have changed, in a thread. If that fails, what was read last stays."""
        if self._is_reading:
            return
        self._is_reading = True
        try:
            if self._rest is not None:
                await self._rest.context()
                if (num_read := self._rest.num_read) != self._rest_num_read:
                    self._rest_num_read = num_read
                    await self._read("rest", self._rest.tls.certificate)
            if self._agent is not None:
                await self._read("agent", self._agent)
        finally:
            self._is_reading = False

    async def _read(self, use: str, path: Path) -> None:
        complaint = ""
        try:
            self.expires_at_s[use] = await asyncio.to_thread(expiry_of, path)
        except (OSError, ValueError) as error:
            complaint = str(error)
            if complaint != self._complaints.get(use):  # a scrape would log it again each time
                logger().warning("kvxfer_certificate_expires_seconds of %s is not up to date: %s", use, error)
        self._complaints[use] = complaint


def expiry_of(path: Path) -> float:
    """Returns when the first of a file's certificates (PEM) expires, in seconds since 1970.

    Raises
    ------
    OSError, ValueError
        The file cannot be read; or it holds no certificate, or one that is malformed.
    """
    found = _PEM.findall(path.read_text("ascii", "replace"))
    if not found:
        raise ValueError(f"{path} holds no certificate in PEM")
    try:
        return min(_not_after(ssl.PEM_cert_to_DER_cert(text)) for text in found)
    except (IndexError, ValueError) as error:
        raise ValueError(f"{path} holds a malformed certificate: {error}") from None


def _not_after(certificate: bytes) -> float:
    """Reads the end of a certificate's validity (RFC 5280, 4.1)."""
    (_, whole) = next(_parts(certificate), (0, b""))
    (_, signed) = next(_parts(whole), (0, b""))
    fields = [content for tag, content in _parts(signed) if tag != _VERSION]
    tag, content = list(_parts(fields[_VALIDITY]))[1]
    text = content.decode("ascii")
    if tag == _UTC_TIME:
        text = ("19" if text >= "5" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _parts(encoded: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the values that follow one another in DER: tag, and content."""
    at = 0
    while at < len(encoded):
        tag, length = encoded[at], encoded[at + 1]
        at += 2
        if length & 0x80:
            at, size = at + (length & 0x7F), encoded[at : at + (length & 0x7F)]
            length = int.from_bytes(size)
        yield tag, encoded[at : at + length]
        at += length
