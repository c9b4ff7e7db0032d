"""What has become of an agent's entry in a directory, and what a slow reader still has to be told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvxfer.directory.entry import Entry


class ChangeKind(StrEnum):
    """What happened to a name. Members equal the words they show."""

    ADDED = "added"
    CHANGED = "changed"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a directory.

    Attributes
    ----------
    kind
        ``CHANGED`` also where a successor has taken the name: its incarnation is another.
    entry
        As it is now; where it was removed, as the reader knew it last.
    """

    kind: ChangeKind
    entry: Entry


class Pending:
    """Changes that a reader has not taken: one for each name, so that a reader who does not read costs
    no more than the names that it knows and those that are there.

    What happened to a name since the reader was last told of it becomes one change, in the place of its
    first; what came and went meanwhile is none.
    """

    def __init__(self) -> None:
        self._changes: dict[str, Change] = {}

    def __len__(self) -> int:
        return len(self._changes)

    def add(self, kind: ChangeKind, entry: Entry) -> None:
        """Notes what has become of a name."""
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
        """Returns the oldest, or None."""
        for name in self._changes:
            return self._changes.pop(name)
        return None
