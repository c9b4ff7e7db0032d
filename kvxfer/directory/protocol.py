"""The protocol that every directory implements."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Protocol, runtime_checkable

from kvxfer.directory.change import Change
from kvxfer.directory.entry import Entry


@runtime_checkable
class Directory(Protocol):
    """Names and the entries of the agents that have them. All methods may be called from any thread.

    A directory is a convenience, not an authority: agents prove their identity in the handshake. A remote
    directory may be slow, and each method may raise `PeerError` (``unreachable``, ``no-answer``) or
    `OSError`; agents tolerate both. ``kvxfer.testing.directories`` has the checks that each directory must
    pass.
    """

    def publish(self, entry: Entry, ttl_s: float | None = None, *, replace: bool = True) -> bool:
        """Makes `entry` the one of its name, and returns whether it now is.

        Parameters
        ----------
        entry
            The entry to publish. If the same incarnation publishes again, this entry replaces the older one
            and its time starts anew.
        ttl_s
            How long the entry stays without being published again, on the directory's monotonic clock; None
            for ever.
        replace
            Whether it replaces another incarnation's entry. With False the call only renews: if a successor
            has taken the name, the successor keeps it, and the call returns False.
        """
        ...

    def withdraw(self, name: str, incarnation: bytes) -> None:
        """Removes the entry of `name` if it is this incarnation's; a successor's entry stays."""

    async def resolve(self, name: str, timeout_s: float) -> Entry:
        """Returns the entry of `name`, waiting for it to be published.

        Raises
        ------
        PeerError
            ``no-answer``: not published in time.
        """
        ...

    def resolve_blocking(self, name: str, timeout_s: float) -> Entry:
        """Returns the entry of `name`: the blocking twin of `resolve`."""
        ...

    def list(self, prefix: str = "") -> tuple[Entry, ...]:
        """Returns the entries whose names begin with `prefix`, in the order of their names."""
        ...

    def watch(self, prefix: str = "", timeout_s: float | None = None) -> AsyncIterator[Change]:
        """Yields changes of entries whose names begin with `prefix`; first yields the existing ones as added.

        The reader gets every change after this call. A reader that falls behind gets one change for each
        name, which sums up all that happened to the name since the reader's last one. The watch ends when the
        iterator is dropped.

        Parameters
        ----------
        timeout_s
            How long to wait for each change; None without bound.

        Raises
        ------
        TimeoutError
            Nothing changed in time. The iterator can still be used, also after its reader was cancelled.
        """
        ...

    def watch_blocking(self, prefix: str = "", timeout_s: float | None = None) -> Iterator[Change]:
        """Yields the same: the blocking twin of `watch`."""
        ...
