"""Layers, heads and tokens as callers pass them: ranges in steps of 1."""

from __future__ import annotations

from kvxfer.errors import invalid


def consecutive(numbers: range, name: str, *, may_be_empty: bool = False) -> range:
    """Checks a range of a caller's and returns it.

    Parameters
    ----------
    name
        The caller's word for it: ``"layers"``, ``"heads"`` or ``"tokens"``.

    Raises
    ------
    UsageError
        ``invalid-argument``, with the name: not a range, steps other than 1, or no numbers at all unless
        `may_be_empty`.
    """
    if type(numbers) is not range:
        raise invalid(f"{name} must be a range, e.g. range(0, 4), or None for all, not {numbers!r:.200}")
    if numbers.step != 1:
        # One number in any step is no gap; len() is limited to 63 bits, and a range is not.
        if numbers[1:]:
            raise invalid(f"{name} of one transfer must be consecutive: post one transfer for each run")
        numbers = range(numbers.start, numbers.start + bool(numbers))
    if not numbers and not may_be_empty:
        raise invalid(f"no {name} were named: leave {name} out for all, or name at least one")
    return numbers
