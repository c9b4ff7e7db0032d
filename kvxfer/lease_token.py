"""Tokens name a lease: the owner sends one, and the reader or writer passes it as ``lease=``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from kvxfer.errors import invalid

# native/core/lease.h: kBearerBit, and as many random bits below it.
_BEARER_BIT: Final = 1 << 62
# The number; then, if they are known, the granting agent's incarnation and its percent-encoded name.
_TEXT: Final = re.compile(r"kvxfer-lease-1\.([0-9a-f]{16})(?:\.([0-9a-f]{32})\.([A-Za-z0-9._~%-]+))?")
# Longer than any text that `str` makes: a name has 128 bytes, each of up to 3 characters.
_MAX_TEXT: Final = 512


@dataclass(frozen=True, slots=True, repr=False)
class LeaseToken:
    """Names one lease of one agent. Take it from `Lease.token`; pass it to ``agent.read(..., lease=token)``.

    ``str(token)`` is its sendable form, ASCII without spaces; `parse` reads it. A token gives access only
    over an authenticated session. If the grant names an agent or an engine, the token works only for that
    holder (`Region.grant`). So a token is useless without the agents' secret and the holder's name. Its
    `repr` shows no number.

    Attributes
    ----------
    agent, incarnation
        The granting agent; empty in a token that was drawn before the grant.
    """

    _number: int
    agent: str = ""
    incarnation: bytes = b""

    def __repr__(self) -> str:
        return f"<LeaseToken of {self.agent!r}>" if self.agent else "<LeaseToken>"

    def __str__(self) -> str:
        if not self.incarnation:
            return f"kvxfer-lease-1.{self._number:016x}"
        from urllib.parse import quote

        return f"kvxfer-lease-1.{self._number:016x}.{self.incarnation.hex()}.{quote(self.agent, safe='')}"

    @classmethod
    def parse(cls, text: str) -> LeaseToken:
        """Reads what ``str(token)`` wrote. Untrusted text is safe to pass.

        Raises
        ------
        UsageError
            ``invalid-argument``: `text` is not a token. The message does not repeat it.
        """
        found = _TEXT.fullmatch(text) if isinstance(text, str) and len(text) <= _MAX_TEXT else None
        if found is None or not (number := int(found[1], 16)):
            raise invalid("the text is not a lease token: pass on all of what str(lease.token) returned")
        if found[2] is None:
            return cls(number)
        from urllib.parse import unquote

        return cls(number, unquote(found[3]), bytes.fromhex(found[2]))

    @classmethod
    def draw(cls) -> LeaseToken:
        """Returns a random token, which cannot be guessed, for a later `Region.grant`.

        Use it when the token must be sent before the grant. Several agents may grant one token, each for its
        own blocks.
        """
        from secrets import randbits

        return cls(_BEARER_BIT | randbits(62))

    def derive(self, index: int) -> LeaseToken:
        """Returns another drawn token; everyone who has this token can derive the same one.

        Use it when one token was drawn, but the agent must grant several leases.

        Parameters
        ----------
        index
            Number of the derived token, not negative. The same token and index give the same result.

        Raises
        ------
        UsageError
            ``invalid-argument``: this token was not drawn, or was granted; `index` is negative, or not a
            whole number.
        """
        if not self._is_drawn or self.incarnation:
            raise invalid(
                "this token was not drawn, or was granted already: derive from a token that "
                "LeaseToken.draw() returned"
            )
        from hashlib import blake2b

        from kvxfer.arguments import count  # loads the native module

        index = count(index, "index", 0, 2**63)
        digest = blake2b(b"%d" % index, key=self._number.to_bytes(8), digest_size=8).digest()
        return LeaseToken(_BEARER_BIT | int.from_bytes(digest) & (_BEARER_BIT - 1))

    @property
    def _is_drawn(self) -> bool:
        return _BEARER_BIT <= self._number < 2 * _BEARER_BIT
