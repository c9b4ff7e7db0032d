"""What an agent and its user ask of a directory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Protocol, runtime_checkable

from kvxfer.directory.change import Change
from kvxfer.directory.entry import Entry


@runtime_checkable
class Directory(Protocol):
    """Names and the entries of the agents that have them. All methods may be called from any thread.

    A directory is a convenience, not an authority: who an agent is, it proves in the handshake. One that
    is elsewhere may be slow, and every method may raise `PeerError` (``unreachable``) or `OSError`; agents
    bear with both. ``kvxfer.testing.directories`` has the checks that each has to pass.
    """

    def publish(self, entry: Entry, ttl_s: float | None = None, *, replace: bool = True) -> bool:
        """Makes `entry` the one of its name, and returns whether it is.

        Parameters
        ----------
        entry
            Published again by the same incarnation it takes the place of the older one, and its time begins
            anew.
        ttl_s
            How long it stays without being published again, on the directory's monotonic clock; None for
            ever.
        replace
            Whether it takes the place of another incarnation's. False renews: a successor that has taken the
            name keeps it, and False is returned.
        """
        ...

    def withdraw(self, name: str, incarnation: bytes) -> None:
        """Forgets the entry of `name` if it is this incarnation's; a successor's stays."""

    async def resolve(self, name: str, timeout_s: float) -> Entry:
        """Returns the entry of `name`, waiting for it to be published.

        Raises
        ------
        PeerError
            ``unreachable``: not published in time.
        """
        ...

    def resolve_blocking(self, name: str, timeout_s: float) -> Entry:
        """Returns the entry of `name`: the blocking twin of `resolve`."""
        ...

    def list(self, prefix: str = "") -> tuple[Entry, ...]:
        """Returns the entries whose names begin with `prefix`, in the order of their names."""
        ...

    def watch(self, prefix: str = "", timeout_s: float | None = None) -> AsyncIterator[Change]:
        """Yields changes of entries whose names begin with `prefix`: first those that are there, as added.

        Everything that changes after this call is told. A reader that falls behind is told of each name
        what has become of it since it last heard, as one change. It ends when the iterator is dropped.

        Parameters
        ----------
        timeout_s
            How long to wait for each change; None without bound.

        Raises
        ------
        TimeoutError
            Nothing changed in time. The iterator may be asked again, also after its reader was cancelled.
        """
        ...

    def watch_blocking(self, prefix: str = "", timeout_s: float | None = None) -> Iterator[Change]:
        """Yields the same: the blocking twin of `watch`."""
        ...
