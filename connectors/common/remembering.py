"""Tables that keep their newest entries: what strangers can fill has a bound."""

from __future__ import annotations

from typing import Final, TypeVar

K = TypeVar("K")
V = TypeVar("V")

_MOST: Final = 1024


def remember(table: dict[K, V], key: K, value: V, most: int = _MOST) -> None:
    """Puts an entry in as the newest, and drops the oldest where there are more than `most`."""
    table.pop(key, None)
    table[key] = value
    if len(table) > most:
        del table[next(iter(table))]
