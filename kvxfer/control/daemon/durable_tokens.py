"""Durable tokens: made, revoked, and found by a secret or a certificate."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from kvxfer.control import schema
from kvxfer.control.schema.client_certificate import ClientCertificate, plain_name
from kvxfer.control.schema.problems import Refusal
from kvxfer.control.state.reserve import NO_ROOM
from kvxfer.control.state.store import Store
from kvxfer.control.state.tokens import MAX_TOKENS, ROLES, Caller, TokenRecord, Tokens
from kvxfer.errors import invalid
from kvxfer.log import logger
from kvxfer.shared_secret import read_secret_file

_KIND: Final = "token"


class DurableTokens:
    """Makes, revokes and finds tokens.

    Parameters
    ----------
    admin_file
        Where the first start writes an admin's token (mode 0600).
    given
        Tokens that were drawn elsewhere, e.g. one for all nodes of a cluster: the role and the file of each.
        They are valid only while the daemon is started with them.
    """

    def __init__(
        self,
        store: Store,
        admin_file: Path,
        clock: Callable[[], float],
        given: Sequence[tuple[str, Path]] = (),
    ) -> None:
        self._store = store
        self._clock = clock
        self._tokens = Tokens(store.load(_KIND, lambda _, told: TokenRecord.from_dict(told)).values())
        self._making: set[str] = set()  # names of certificates whose tokens are being stored
        self._num_making = 0
        self._on_revoked: list[Callable[[str], None]] = []
        #: The file of the admin's token, if this start has written it; otherwise None.
        self.admin_file: Path | None = None
        self._path = admin_file
        #: The option that gave each token, by the token's id.
        self._given = dict(self._read(given))

    async def start(self) -> None:
        """Makes an admin's token if there is no token at all.

        Raises
        ------
        OSError, Refusal
            The token cannot be written.
        """
        if len(self._tokens) > len(self._given):
            return
        record, secret = Tokens.draw("admin", "admin", None, self._clock(), None)
        # The file first: a stored token whose secret is lost would prevent making another one.
        try:
            self._path.unlink(missing_ok=True)
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.write(file, secret.encode() + b"\n")
                os.fsync(file)
            finally:
                os.close(file)
            await self._store.put(_KIND, record.id, record.to_dict())
        except (OSError, Refusal) as error:
            if isinstance(error, OSError) and error.errno not in NO_ROOM:
                raise
            logger().warning(
                "no admin's token was made (%s): the next start makes one; the socket needs none", error
            )
            return
        self._tokens.add(record)
        self.admin_file = self._path

    def _read(self, given: Sequence[tuple[str, Path]]) -> Iterator[tuple[str, str]]:
        for role, path in given:
            token = None
            option = f"--token {role}={path}"
            if role in ROLES:
                try:
                    text = read_secret_file(path, option).decode("utf-8", "replace")
                except OSError as error:
                    raise invalid(f"{option}: the file cannot be read: {error.strerror}") from None
                token = Tokens.given(path.name, role, text.strip(), self._clock())
            if token is None:
                raise invalid(
                    f"{option}: write a role ({', '.join(ROLES)}) and a file with kvx_, "
                    "16 hexadecimal digits, _ and at least 32 random letters and digits"
                )
            self._tokens.revoke(token.id)
            self._tokens.add(token)
            yield token.id, option

    def of_secret(self, secret: str) -> Caller | None:
        """Returns the caller that a secret identifies."""
        return self._tokens.find(secret, self._clock())

    def of_certificate(self, certificate: ClientCertificate) -> Caller | None:
        """Returns the caller that a certificate identifies."""
        return self._tokens.of_certificate(certificate, self._clock())

    def is_valid(self, caller: Caller) -> bool:
        """Whether a caller that was admitted earlier would still be admitted now."""
        kind, _, id_ = caller.key.partition(":")
        if kind != "token":
            return True
        if caller.until_s is not None and self._clock() >= caller.until_s:
            return False
        token = self._tokens.get(id_)
        return token is not None and (token.expires_at_s is None or self._clock() < token.expires_at_s)

    def shown(self) -> list[schema.Token]:
        """Returns all tokens, without their secrets."""
        return [schema.Token.model_validate(_shown(token)) for token in self._tokens.listed()]

    async def make(self, asked: schema.TokenRequest) -> schema.TokenMade:
        """Makes a token, which is valid once it is stored."""
        if asked.certificate is None:
            return await self._make(asked, None)
        name = plain_name(asked.certificate)
        if name is None:
            raise Refusal("invalid-argument", f"{asked.certificate!r} is not a certificate's name")
        await self._forget_expired(name)
        if self._tokens.has_certificate(name) or name in self._making:
            raise Refusal(
                "conflict", f"there is already a token for {name}: revoke it, or name another certificate"
            )
        self._making.add(name)
        try:
            return await self._make(asked, name)
        finally:
            self._making.discard(name)

    async def _make(self, asked: schema.TokenRequest, certificate: str | None) -> schema.TokenMade:
        if len(self._tokens) + self._num_making >= MAX_TOKENS:
            await self._forget_expired()
        if len(self._tokens) + self._num_making >= MAX_TOKENS:
            raise Refusal("exhausted", f"there are {MAX_TOKENS} tokens: revoke some")
        record, secret = Tokens.draw(
            asked.name, asked.role, asked.tenants, self._clock(), asked.ttl_s, certificate
        )
        self._num_making += 1
        try:
            await self._store.put(_KIND, record.id, record.to_dict())
        finally:
            self._num_making -= 1
        self._tokens.add(record)
        return schema.TokenMade.model_validate({**_shown(record), "secret": secret or None})

    async def _forget_expired(self, certificate: str = "") -> None:
        """Forgets tokens whose time is over, or only that of one certificate: they make room for others."""
        ids = [
            token.id
            for token in self._tokens.expired(self._clock())
            if token.id not in self._given and certificate in ("", token.certificate)
        ]
        if ids:
            await self._store.remove(_KIND, *ids)
        for id_ in ids:
            self._tokens.revoke(id_)

    async def revoke(self, id_: str, caller: Caller) -> schema.Token:
        """Revokes a token: when this returns it is invalid, also after a restart.

        A token cannot revoke itself. To replace a token, make a new one, and revoke the old one with it.
        """
        token = self._tokens.get(id_)
        if caller.key == f"token:{id_}":
            raise Refusal(
                "conflict", "a token cannot revoke itself: make another, and revoke this one with it"
            )
        if token is None:
            raise Refusal("not-found", f"there is no token {id_!r}")
        if (option := self._given.get(id_)) is not None:
            raise Refusal(
                "conflict", f"this token comes from {option!r}: restart the daemon without that option"
            )
        await self._store.remove(_KIND, id_, need="reserve")
        self._tokens.revoke(id_)
        for told in self._on_revoked:
            told(f"token:{id_}")
        return schema.Token.model_validate(_shown(token))

    def on_revoked(self, told: Callable[[str], None]) -> None:
        """Registers `told`, which is called with the key of each caller whose token is revoked."""
        self._on_revoked.append(told)


def _shown(token: TokenRecord) -> dict[str, Any]:
    told = token.to_dict()
    del told["digest"]
    return told
