"""Access rights: tokens by the hash of their secret or by a certificate's name, roles, and tenants."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvxfer.control.schema.client_certificate import ClientCertificate

#: Each role includes the rights of those before it.
ROLES: Final = ("read", "transfer", "admin")
_SECRET: Final = re.compile(r"kvx_([0-9a-f]{16})_([A-Za-z0-9_-]{32,256})")
#: Bytes of a secret. It cannot be guessed, so a slow hash would gain nothing.
_SECRET_NBYTES: Final = 32
MAX_TOKENS: Final = 4096


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request.

    Attributes
    ----------
    key
        Separates the limits and idempotency keys of callers.
    name
        For people, and the audit log.
    role
        One of `ROLES`.
    tenants
        The tenants whose pages and transfers it sees and makes; None for all.
    certificate
        Digest of the certificate that identified it; ``""`` if a token or the socket did.
    until_s
        When that certificate expires.
    """

    key: str
    name: str
    role: str
    tenants: frozenset[str] | None = None
    certificate: str = ""
    until_s: float | None = None

    def may(self, role: str) -> bool:
        """Whether it has the rights of `role`."""
        return ROLES.index(self.role) >= ROLES.index(role)

    def sees(self, tenant: str) -> bool:
        """Whether it may see things of `tenant`."""
        return self.tenants is None or tenant in self.tenants


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A token as it is stored, without its secret; `certificate` is set for one that has no secret."""

    id: str
    name: str
    role: str
    tenants: tuple[str, ...] | None
    digest: str
    made_at_s: float
    expires_at_s: float | None
    certificate: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns it as a dict of JSON's types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> TokenRecord:
        """Reads the dict of `to_dict`, after JSON has carried it."""
        tenants = told["tenants"]
        token = cls(**{**told, "tenants": None if tenants is None else tuple(tenants)})
        if token.role not in ROLES or not isinstance(token.digest, str):
            raise ValueError(f"it has role {token.role!r} and no digest, or no such role")
        return token


class Tokens:
    """All valid tokens. A change takes effect with the next request."""

    def __init__(self, kept: Iterable[TokenRecord] = ()) -> None:
        self._by_id: dict[str, TokenRecord] = {}
        self._by_certificate: dict[str, TokenRecord] = {}
        for token in kept:
            self.add(token)

    def __len__(self) -> int:
        return len(self._by_id)

    def listed(self) -> list[TokenRecord]:
        """Returns all tokens, the oldest first."""
        return sorted(self._by_id.values(), key=lambda token: (token.made_at_s, token.id))

    def expired(self, now_s: float) -> list[TokenRecord]:
        """Returns the tokens whose time is over."""
        return [token for token in self._by_id.values() if not _holds(token, now_s)]

    @staticmethod
    def draw(
        name: str,
        role: str,
        tenants: Iterable[str] | None,
        now_s: float,
        ttl_s: float | None,
        certificate: str | None = None,
    ) -> tuple[TokenRecord, str]:
        """Returns a new token and its secret. `add` makes the token valid; the secret is stored nowhere.

        With the name of a certificate the secret is ``""``, and cannot be used.
        """
        id_ = secrets.token_hex(8)
        secret = f"kvx_{id_}_{secrets.token_urlsafe(_SECRET_NBYTES)}" if certificate is None else ""
        record = TokenRecord(
            id=id_,
            name=name,
            role=role,
            tenants=None if tenants is None else tuple(sorted(set(tenants))),
            digest=_digest(secret) if secret else "",
            made_at_s=now_s,
            expires_at_s=None if ttl_s is None else now_s + ttl_s,
            certificate=certificate,
        )
        return record, secret

    @staticmethod
    def given(name: str, role: str, secret: str, now_s: float) -> TokenRecord | None:
        """Returns the token for a secret that was drawn elsewhere; None if the secret has the wrong form."""
        found = _SECRET.fullmatch(secret)
        if found is None:
            return None
        return TokenRecord(found[1], name, role, None, _digest(secret), now_s, None)

    def add(self, token: TokenRecord) -> None:
        """Makes a token valid."""
        self._by_id[token.id] = token
        if token.certificate is not None:
            self._by_certificate[token.certificate] = token

    def get(self, id_: str) -> TokenRecord | None:
        """Returns a token by its id."""
        return self._by_id.get(id_)

    def revoke(self, id_: str) -> TokenRecord | None:
        """Makes a token invalid, and returns it."""
        token = self._by_id.pop(id_, None)
        if token is not None and token.certificate is not None:
            del self._by_certificate[token.certificate]
        return token

    def has_certificate(self, name: str) -> bool:
        """Whether there is a token for a certificate of this name."""
        return name in self._by_certificate

    def of_certificate(self, certificate: ClientCertificate, now_s: float) -> Caller | None:
        """Returns the caller of a certificate; None if there is none, or it or its token has expired.

        A token for the digest takes precedence over tokens for names. If the names match several tokens, the
        caller is unknown, and the result is None.
        """
        if now_s >= certificate.until_s:
            return None
        exact = self._by_certificate.get(f"SHA256:{certificate.digest}")
        found = [exact] if exact is not None else list(map(self._by_certificate.get, certificate.names))
        valid = [token for token in found if token is not None and _holds(token, now_s)]
        if len(valid) != 1:
            return None
        (token,) = valid
        return _caller(token, certificate.digest, certificate.until_s)

    def find(self, secret: str, now_s: float) -> Caller | None:
        """Returns the caller that a secret identifies; None if it is wrong, expired or revoked.

        The id within the secret finds the token. Only the comparison of the hash decides, and it takes the
        same time for every secret.
        """
        parts = secret.split("_", 2)
        token = self._by_id.get(parts[1]) if len(parts) == 3 and parts[0] == "kvx" else None
        expected = token.digest if token is not None else _NOBODY
        if not hmac.compare_digest(_digest(secret), expected) or token is None:
            return None
        return _caller(token) if _holds(token, now_s) else None


def _holds(token: TokenRecord, now_s: float) -> bool:
    return token.expires_at_s is None or now_s < token.expires_at_s


def _caller(token: TokenRecord, certificate: str = "", until_s: float | None = None) -> Caller:
    tenants = None if token.tenants is None else frozenset(token.tenants)
    return Caller(f"token:{token.id}", token.name, token.role, tenants, certificate, until_s)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


_NOBODY: Final = _digest("")
