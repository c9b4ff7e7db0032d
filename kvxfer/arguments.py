"""What callers pass: its kind, times and whole numbers, checked before anything else happens."""

from __future__ import annotations

from types import UnionType
from typing import Any

import numpy as np

from kvxfer._native import NativeError, to_count, to_seconds
from kvxfer.errors import invalid, translate

# What native code takes for a wait without bound.
_UNBOUNDED = -1.0
# Of what was passed instead, as much as a line of a log bears.
_MOST_SHOWN = 200


def check_kind(
    value: object, name: str, kind: type | UnionType, what: str, *, is_secret: bool = False
) -> None:
    """Raises where an argument is of another kind than it must be.

    Parameters
    ----------
    name, what
        What the argument is called, and what it should be, in words.
    is_secret
        Whether what was passed may be a secret: then only its type is told.

    Raises
    ------
    UsageError
        ``invalid-argument``: ``"{name} is {what}, not ..."``.
    """
    if isinstance(value, kind):
        return
    shown = f"a {type(value).__name__}" if is_secret else repr(value)
    if len(shown) > _MOST_SHOWN:
        shown = f"{shown[:_MOST_SHOWN]}..."
    raise invalid(f"{name} is {what}, not {shown}")


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
    """Returns a time in seconds, 0 to 1e9: any number, numpy's too; more, also infinity, is 1e9 (31 years).

    Raises
    ------
    UsageError
        ``invalid-argument``, naming the argument: NaN, a negative number, a bool or no number.
    """
    try:
        return to_seconds(value, name)
    except NativeError as error:
        raise translate(error) from None


def seconds_or_none(value: Any, name: str) -> float | None:
    """Returns the same, or None for None."""
    return None if value is None else seconds(value, name)


def bound(timeout_s: Any) -> float:
    """Returns a ``timeout_s`` as native waits take it: None is a wait without bound."""
    return _UNBOUNDED if timeout_s is None else seconds(timeout_s, "timeout_s")


def context_in_words(context: Any) -> str:
    """Returns a caller's ``context`` as errors have it, also one that is refused."""
    if isinstance(context, bytes):
        return context.decode(errors="replace")
    return context if isinstance(context, str) else ""


def count(value: Any, name: str, low: int, high: int, what: str = "") -> int:
    """Returns a whole number, numpy's too, as an int.

    Raises
    ------
    UsageError
        ``invalid-argument``, naming the argument: a bool, no whole number, or not `low` to `high`. The
        message says `what` it should be, in words, where that is not all.
    """
    try:
        return to_count(value, name, low, high, what)
    except NativeError as error:
        raise translate(error) from None
