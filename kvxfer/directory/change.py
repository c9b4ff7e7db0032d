"""Changes of directory entries, and the queue of changes that a slow reader has not read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvxfer.directory.entry import Entry


class ChangeKind(StrEnum):
    """What happened to a name. Each member equals its word."""

    ADDED = "added"
    CHANGED = "changed"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a directory.

    Attributes
    ----------
    kind
        ``CHANGED`` also if a successor has taken the name; its incarnation differs.
    entry
        The entry as it is now; after a removal, the entry as the reader knew it last.
    """

    kind: ChangeKind
    entry: Entry


class Pending:
    """Changes that a reader has not taken.

    There is at most one for each name. So a reader that stops reading costs at most the names that it knows
    and the names that exist.

    All changes of a name since the reader last took one become one change, in the place of the first. A name
    that came and went meanwhile is no change.
    """

    def __init__(self) -> None:
        self._changes: dict[str, Change] = {}

    def __len__(self) -> int:
        return len(self._changes)

    def add(self, kind: ChangeKind, entry: Entry) -> None:
        """Records a change of a name."""
        before = self._changes.get(entry.name)
        if before is not None and before.kind is ChangeKind.ADDED:
            if kind is ChangeKind.REMOVED:
                del self._changes[entry.name]
                return
            kind = ChangeKind.ADDED
        elif before is not None and kind is ChangeKind.ADDED:
            kind = ChangeKind.CHANGED
        self._changes[entry.name] = Change(kind, entry)

    def take(self) -> Change | None:
        """Returns the oldest change, or None."""
        for name in self._changes:
            return self._changes.pop(name)
        return None
