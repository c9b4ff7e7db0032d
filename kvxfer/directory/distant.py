"""What a directory elsewhere is asked for: its entries, what changes of them, and two writes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvxfer.directory.entry import Entry


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All entries that are there, by name, as of `revision`."""

    entries: dict[str, Entry]
    revision: int


@dataclass(frozen=True, slots=True)
class Update:
    """One name's entry from `revision` on; None where there is none any more."""

    name: str
    entry: Entry | None
    revision: int


class Distant(Protocol):
    """Entries that lie elsewhere. Its methods run on one event loop, and each ends within some seconds.

    Revisions are those of the entries together; a later change has a greater one, as long as the contact
    lasts. That of a write is its change's, or a later one of other names alone.

    Every method raises `PeerError` (``unreachable``) where it got no answer; `MirroredDirectory` then begins
    anew, with `renew` and `snapshot`.
    """

    where: str

    async def snapshot(self) -> Snapshot:
        """Returns all entries."""
        ...

    def updates(self, after: int) -> AsyncIterator[Sequence[Update]]:
        """Yields what changes behind a revision, without end; it ends where a snapshot has to be taken."""
        ...

    async def publish(self, entry: Entry, ttl_s: float | None, replace: bool) -> int | None:
        """Has `entry` there, as `Directory.publish` says; returns its revision, None where it is not.

        With a `ttl_s` of None it stays for as long as `keep` is called.
        """
        ...

    async def withdraw(self, name: str, incarnation: bytes) -> int:
        """Forgets the entry if it is this incarnation's; returns the revision of that, or one before."""
        ...

    async def keep(self) -> bool:
        """Keeps what was published without a time; False where it is lost and has to be published again."""
        ...

    async def renew(self) -> None:
        """Drops connections: those that come may lead to another server, with certificates read anew."""

    async def close(self) -> None:
        """Ends what `keep` kept, if it is answered, and drops connections."""
