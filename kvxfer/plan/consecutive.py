"""Layers, heads and tokens as callers pass them: consecutive whole numbers."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from kvxfer.errors import invalid


def consecutive(numbers: Iterable[int], name: str, *, may_be_empty: bool = False) -> range:
    """Returns `numbers` as a range in steps of 1.

    A range costs nothing; other input is read number by number.

    Parameters
    ----------
    name
        The caller's word for them: ``"layers"``, ``"heads"`` or ``"tokens"``.

    Raises
    ------
    UsageError
        ``invalid-argument``, naming them: not whole numbers, gaps between them, or no numbers at all unless
        `may_be_empty`.
    """
    if isinstance(numbers, range):
        # len() is limited to 63 bits; a range is not.
        found = numbers if numbers.step == 1 else range(numbers.start, numbers.start + bool(numbers))
        has_gaps = numbers.step != 1 and bool(numbers[1:])
    else:
        items = _whole_numbers(numbers, name)
        first = items[0] if items else 0
        found = range(first, first + len(items))
        has_gaps = items != list(found)
    if has_gaps:
        raise invalid(
            f"{name} of one transfer must be consecutive and ascending: post one transfer for each run"
        )
    if not found and not may_be_empty:
        raise invalid(f"no {name} were named: leave {name} out for all, or name at least one")
    return found


def _whole_numbers(numbers: Any, name: str) -> list[int]:
    try:
        if isinstance(numbers, str | bytes):
            raise TypeError
        items = list(numbers)
        if any(isinstance(item, bool) for item in items):
            raise TypeError
        return [operator.index(item) for item in items]
    except TypeError:
        raise invalid(
            f"{name} must be consecutive whole numbers, e.g. range(0, 4), or None for all, not "
            f"{numbers!r:.200}"
        ) from None
