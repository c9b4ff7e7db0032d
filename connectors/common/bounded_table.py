"""Tables that keep only their newest entries, because strangers can add entries."""

from __future__ import annotations

from typing import Final, TypeVar

K = TypeVar("K")
V = TypeVar("V")

_MOST: Final = 1024


def remember(table: dict[K, V], key: K, value: V, most: int = _MOST) -> None:
    """Adds an entry as the newest, and drops the oldest if there are more than `most`."""
    table.pop(key, None)
    table[key] = value
    if len(table) > most:
        del table[next(iter(table))]
