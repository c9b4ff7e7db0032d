"""The protocol of remote directories: entries, their changes, and two writes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvxfer.directory.entry import Entry


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All entries, by name, as of `revision`."""

    entries: dict[str, Entry]
    revision: int


@dataclass(frozen=True, slots=True)
class Update:
    """One name's entry from `revision` on; None if it was removed."""

    name: str
    entry: Entry | None
    revision: int


class Distant(Protocol):
    """Entries in another process. Methods run on one event loop, and each ends within some seconds.

    A revision counts changes of all entries together; as long as the contact lasts, a later change has a
    greater revision. The revision of a write is that of its change, or a later one in which only other names
    changed.

    Every method raises `PeerError` (``unreachable``) if it gets no answer; `MirroredDirectory` then starts
    anew with `renew` and `snapshot`.
    """

    where: str

    async def snapshot(self) -> Snapshot:
        """Returns all entries."""
        ...

    def updates(self, after: int) -> AsyncIterator[Sequence[Update]]:
        """Yields the changes after a revision; ends only if a new snapshot is necessary."""
        ...

    async def publish(self, entry: Entry, ttl_s: float | None, replace: bool) -> int | None:
        """Publishes `entry`, as in `Directory.publish`; returns its revision, or None if it was refused.

        With a `ttl_s` of None the entry stays as long as `keep` is called.
        """
        ...

    async def withdraw(self, name: str, incarnation: bytes) -> int:
        """Removes the entry if it is this incarnation's.

        Returns the revision of the removal, or an earlier one.
        """
        ...

    async def keep(self) -> bool:
        """Renews entries without a `ttl_s`; False if they are lost and must be published again."""
        ...

    async def renew(self) -> None:
        """Drops connections. New ones may lead to another server, and read certificates again."""

    async def close(self) -> None:
        """Removes the entries that `keep` renewed, if the server answers, and drops connections."""
