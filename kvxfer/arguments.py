"""Checks of callers' arguments: kinds, times and whole numbers, before anything else happens."""

from __future__ import annotations

from types import UnionType
from typing import Any

import numpy as np

from kvxfer._native import NativeError, to_count, to_seconds
from kvxfer.errors import invalid, translate

# Native code's value for a wait without bound.
_UNBOUNDED = -1.0
# Most characters of a wrong argument that a message shows, to fit a log line.
_MOST_SHOWN = 200


def check_kind(
    value: object, name: str, kind: type | UnionType, what: str, *, is_secret: bool = False
) -> None:
    """Raises if an argument has the wrong kind.

    Parameters
    ----------
    name, what
        The argument's name, and a description of what it should be.
    is_secret
        Whether the value may be a secret; then the message has only its type.

    Raises
    ------
    UsageError
        ``invalid-argument``: ``"{name} is {what}, not ..."``.
    """
    if isinstance(value, kind):
        return
    raise invalid(f"{name} must be {what}, not {type_of(value) if is_secret else shown(value)}")


def type_of(value: object) -> str:
    """Returns the value's type in words."""
    return f"a {type(value).__name__}"


def shown(value: object) -> str:
    """Returns a value as a message shows it: its repr, cut; its type if it has none."""
    try:
        text = repr(value).encode(errors="backslashreplace").decode()
    except Exception:  # any code may run there
        return type_of(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def flag(value: object, name: str) -> bool:
    """Returns True or False, numpy's too.

    Raises
    ------
    UsageError
        ``invalid-argument``, naming the argument: anything else.
    """
    if value is True or value is False:
        return value
    check_kind(value, name, np.bool_, "True or False")
    return bool(value)


def seconds(value: Any, name: str) -> float:
    """Returns a time in seconds, 0 to 1e9.

    Takes any number, also numpy's. More than 1e9 (31 years), including infinity, becomes 1e9.

    Raises
    ------
    UsageError
        ``invalid-argument``, naming the argument: NaN, a negative number, a bool, or not a number.
    """
    try:
        return to_seconds(value, name)
    except NativeError as error:
        raise translate(error) from None


def seconds_or_none(value: Any, name: str) -> float | None:
    """Returns the same, or None for None."""
    return None if value is None else seconds(value, name)


def bound(timeout_s: Any) -> float:
    """Returns a ``timeout_s`` in the form of native waits; None means a wait without bound."""
    return _UNBOUNDED if timeout_s is None else seconds(timeout_s, "timeout_s")


def context_in_words(context: Any) -> str:
    """Returns a caller's ``context`` as text for errors, even if it will be refused."""
    if isinstance(context, bytes):
        return context.decode(errors="replace")
    return context if isinstance(context, str) else ""


def count(value: Any, name: str, low: int, high: int, what: str = "") -> int:
    """Returns a whole number, numpy's too, as an int.

    Raises
    ------
    UsageError
        ``invalid-argument``, naming the argument: a bool, not a whole number, or not `low` to `high`. `what`
        describes the valid values in the message if that needs more words.
    """
    try:
        return to_count(value, name, low, high, what)
    except NativeError as error:
        raise translate(error) from None
