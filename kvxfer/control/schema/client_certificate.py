"""A client's certificate, after TLS has checked it: its names, and when it expires."""

from __future__ import annotations

import hashlib
import re
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

#: The form of a certificate's name in a token. Stars are excluded, so that a name means one client.
NAME: Final = (
    r"^(DNS:[A-Za-z0-9._-]{1,253}|URI:[\x21-\x29\x2b-\x7e]{1,256}|CN:[\x20-\x29\x2b-\x7e]{1,64}"
    r"|SHA256:[0-9a-f]{64})$"
)
_NAME: Final = re.compile(NAME)
_KINDS: Final = ("DNS", "URI")
# No client needs more, and a certificate may have thousands.
_MOST_NAMES: Final = 64


def plain_name(name: str) -> str | None:
    """Returns a name in its compared form; None if it cannot match: a star, a zero byte, too long."""
    if _NAME.fullmatch(name) is None or "\n" in name:
        return None
    return name.lower() if name.startswith("DNS:") else name


@dataclass(frozen=True, slots=True)
class ClientCertificate:
    """A certificate of a trusted authority; the client has proved that it holds the key.

    Attributes
    ----------
    digest
        SHA-256 of the whole certificate, in hexadecimal digits.
    names
        ``"DNS:host"`` and ``"URI:..."`` of its subjectAltName, and ``"CN:..."`` if its subject has exactly
        one. Names that cannot match a token are left out.
    until_s
        When it expires, in seconds since 1970.
    """

    digest: str
    names: frozenset[str]
    until_s: float

    @classmethod
    def read(cls, encoded: bytes, told: Mapping[str, Any] | None) -> ClientCertificate:
        """Reads the results of `ssl.SSLSocket.getpeercert`: its binary form, and its dict.

        Without a dict the certificate was not checked; it then counts as expired.
        """
        digest = hashlib.sha256(encoded).hexdigest()
        if not told:
            return cls(digest, frozenset(), 0.0)
        found = [plain for name in _names(told) if (plain := plain_name(name)) is not None]
        until_s = float(ssl.cert_time_to_seconds(str(told["notAfter"])))
        return cls(digest, frozenset(found[:_MOST_NAMES]), until_s)


def _names(told: Mapping[str, Any]) -> Iterator[str]:
    for kind, value in told.get("subjectAltName", ()):
        if kind in _KINDS:
            yield f"{kind}:{value}"
    common = [value for part in told.get("subject", ()) for kind, value in part if kind == "commonName"]
    if len(common) == 1:
        yield f"CN:{common[0]}"
