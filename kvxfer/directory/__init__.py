"""Where agents find each other: a name -> the address that an agent of it listens on."""

from __future__ import annotations

from typing import Protocol


class Directory(Protocol):
    """What an agent asks of a directory. All methods may be called from any thread.

    A directory is a convenience, not an authority: who an agent is, it proves in the handshake.
    """

    def publish(self, name: str, address: str) -> None:
        """Makes `address` the one of `name`, in the place of an older one. Does not wait for others."""

    def withdraw(self, name: str, address: str) -> None:
        """Forgets `name` if it still has this address; a successor under the same name stays."""

    async def resolve(self, name: str, timeout_s: float) -> str:
        """Returns the address of `name`, waiting for it to be published.

        Raises
        ------
        PeerError
            ``unreachable``: not published in time.
        """
        ...

    def resolve_blocking(self, name: str, timeout_s: float) -> str:
        """Returns the address of `name`: the blocking twin of `resolve`."""
        ...
