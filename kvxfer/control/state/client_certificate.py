"""A client's certificate, which TLS has checked: by which names it may be known, and how long it holds."""

from __future__ import annotations

import hashlib
import re
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

#: How a certificate is named where a role is given to it. No name has a star: one stands for one client.
NAME: Final = (
    r"^(DNS:[A-Za-z0-9._-]{1,253}|URI:[\x21-\x29\x2b-\x7e]{1,256}|CN:[\x20-\x29\x2b-\x7e]{1,64}"
    r"|SHA256:[0-9a-f]{64})$"
)
_NAME: Final = re.compile(NAME)
_KINDS: Final = ("DNS", "URI")
# Nobody needs more, and a certificate may hold thousands.
_MOST_NAMES: Final = 64


def plain_name(name: str) -> str | None:
    """Returns a name as it is compared; None for what names no client: with a star, a zero byte, too long."""
    if _NAME.fullmatch(name) is None or "\n" in name:
        return None
    return name.lower() if name.startswith("DNS:") else name


@dataclass(frozen=True, slots=True)
class ClientCertificate:
    """One that its holder proved to have, of an authority that the daemon trusts.

    Attributes
    ----------
    digest
        SHA-256 of all of it, in hexadecimal digits.
    names
        ``"DNS:host"`` and ``"URI:..."`` of its subjectAltName, and ``"CN:..."`` of its subject where that has
        one; those that name no client are left out.
    until_s
        It expires then, in seconds since 1970.
    """

    digest: str
    names: frozenset[str]
    until_s: float

    @classmethod
    def read(cls, encoded: bytes, told: Mapping[str, Any] | None) -> ClientCertificate:
        """Reads what `ssl.SSLSocket.getpeercert` returns, in its binary form and as a dict.

        Without a dict, as of one that was not checked, it has expired.
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
