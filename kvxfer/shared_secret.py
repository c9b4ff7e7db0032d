"""Shared secrets for authentication between agents: given, from a file, or from the environment."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvxfer.errors import invalid
from kvxfer.log import logger

# 128 bits: a shorter secret could be guessed offline from one recorded handshake.
MIN_SECRET_NBYTES: Final = 16
MOST_SECRETS: Final = 2
VALUE_VARIABLE: Final = "KVXFER_SECRET"
FILE_VARIABLE: Final = "KVXFER_SECRET_FILE"
# Limit for two lines with room to spare. A longer file is not a file of secrets.
_MOST_FILE_NBYTES: Final = 4096

#: What `AgentOptions.secret` takes.
SecretOption = bytes | str | os.PathLike[str] | tuple[bytes | str, ...]

_warned = False
# Files of which was said that others can read them.
_warned_files: set[str] = set()


@dataclass(frozen=True, slots=True)
class Secrets:
    """Secrets that an agent accepts.

    Attributes
    ----------
    accepted
        One or two, the preferred one first. Empty for none; then the user's own secret is used.
    file
        Absolute path of the file that they were read from; ``""`` for none.
    variable
        The variable of the environment that named them; ``""`` for none.
    """

    accepted: tuple[bytes, ...] = ()
    file: str = ""
    variable: str = ""

    def __repr__(self) -> str:
        return f"Secrets({len(self.accepted)} of them, file={self.file!r}, variable={self.variable!r})"

    @property
    def first(self) -> bytes:
        """The preferred one; ``b""`` for none."""
        return self.accepted[0] if self.accepted else b""

    @property
    def second(self) -> bytes:
        """The one that is accepted as well; ``b""`` for none."""
        return self.accepted[1] if len(self.accepted) == MOST_SECRETS else b""


def find_secrets(given: SecretOption | None, environment: Mapping[str, str] = os.environ) -> Secrets:
    """Returns the given secrets, or else the environment's.

    Raises
    ------
    UsageError
        ``invalid-argument``: one is shorter than 16 bytes, there are more than two, the file cannot be read,
        or both variables are set. An empty variable is an error, because it was probably meant to have a
        value. The message contains no byte of a secret.
    """
    if isinstance(given, os.PathLike):
        return _of_file(os.fspath(given), f"the secret's file ({os.fspath(given)})", "")
    if given is not None:
        return Secrets(given_secrets(given, may_be_empty=True))
    value, path = environment.get(VALUE_VARIABLE), environment.get(FILE_VARIABLE)
    if value is not None and path is not None:
        raise invalid(f"{VALUE_VARIABLE} and {FILE_VARIABLE} are both set: unset one")
    if value is not None:
        return Secrets((_checked(os.fsencode(value), VALUE_VARIABLE),), variable=VALUE_VARIABLE)
    if path is not None:
        return _of_file(path, f"{FILE_VARIABLE} ({path})", FILE_VARIABLE)
    return Secrets()


def given_secrets(given: object, *, may_be_empty: bool = False) -> tuple[bytes, ...]:
    """Returns a secret, or a tuple of one or two, as bytes, with the checks of `find_secrets`."""
    if isinstance(given, bytes | str) and not given and may_be_empty:
        return ()
    one_or_two = given if isinstance(given, tuple) else (given,)
    if not 0 < len(one_or_two) <= MOST_SECRETS:
        raise invalid(f"the secret argument has {len(one_or_two)} secrets: one or two are accepted at a time")
    for each in one_or_two:
        if not isinstance(each, bytes | str):
            kind = type(each).__name__
            raise invalid(
                f"the secret argument is {kind}, but must be bytes, text, a file's path or a tuple of two"
            )
    return tuple(
        _checked(
            each.encode("utf-8", "surrogateescape") if isinstance(each, str) else each, "the secret argument"
        )
        for each in one_or_two
    )


def warn_of_value(secrets: Secrets) -> None:
    """Logs, once in a process, that the secret is in the environment, which all children inherit."""
    global _warned
    if secrets.variable != VALUE_VARIABLE or _warned:
        return
    _warned = True
    logger().warning(
        "kvxfer: the secret is in %s: every program that this process starts inherits it, and it cannot be "
        "changed while agents run. Name a file in %s instead",
        VALUE_VARIABLE,
        FILE_VARIABLE,
    )


def read_secret_file(path: str | os.PathLike[str], origin: str) -> bytes:
    """Returns the beginning of a file with a secret, one byte more than such a file may have.

    Logs, once for each file, that all users of the host can read it.

    Raises
    ------
    OSError, ValueError
        It cannot be read.
    UsageError
        ``invalid-argument``: it belongs to another user than this one and root, or all users may write to it.
    """
    from pathlib import Path

    with Path(path).open("rb") as file:
        found = os.fstat(file.fileno())
        if stat.S_ISREG(found.st_mode):
            mode = stat.S_IMODE(found.st_mode)
            if found.st_uid not in (0, os.geteuid()) or mode & stat.S_IWOTH:
                raise invalid(
                    f"{origin} belongs to user {found.st_uid} and has mode {mode:o}, so that another user "
                    f"may write the secret: give it to user {os.geteuid()}, and run chmod 600 on it"
                )
            if mode & stat.S_IROTH and str(path) not in _warned_files:
                _warned_files.add(str(path))
                logger().warning(
                    "kvxfer: %s has mode %o, so that every user of this host can read the secret: run chmod "
                    "600 on it",
                    origin,
                    mode,
                )
        return file.read(_MOST_FILE_NBYTES + 1)


def _of_file(path: str, origin: str, variable: str) -> Secrets:
    from pathlib import Path

    try:
        text = read_secret_file(path, origin)
    except (OSError, ValueError) as error:
        raise invalid(f"{origin} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return Secrets(_lines_of(text, origin), str(Path(path).absolute()), variable)


# native/core/control/secret_file.cpp reads a file that changed, by the same rules.
def _lines_of(text: bytes, origin: str) -> tuple[bytes, ...]:
    if len(text) > _MOST_FILE_NBYTES:
        raise invalid(
            f"{origin} has more than {_MOST_FILE_NBYTES} bytes: write one or two secrets into it, one a line"
        )
    lines = [line.rstrip(b"\r") for line in text.rstrip(b"\r\n").split(b"\n")]
    if len(lines) > MOST_SECRETS:
        raise invalid(
            f"{origin} has {len(lines)} lines: one or two secrets are accepted at a time, one a line"
        )
    return tuple(_checked(line, origin) for line in lines)


def _checked(secret: bytes, origin: str) -> bytes:
    if len(secret) < MIN_SECRET_NBYTES:
        raise invalid(
            f"{origin} has {len(secret)} bytes, and a secret needs at least {MIN_SECRET_NBYTES}: make one "
            "with `openssl rand -hex 32`"
        )
    return secret
