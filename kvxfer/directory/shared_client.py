"""A client that several calls use at once."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar


class _Closable(Protocol):
    async def aclose(self) -> None: ...


_Client = TypeVar("_Client", bound=_Closable)


class SharedClient(Generic[_Client]):
    """Lends a client to calls; once it is dropped, the last of them closes it, so that none is cut off.

    Belongs to one event loop.
    """

    def __init__(self, client: _Client) -> None:
        self._client = client
        self._num_users = 0
        self._is_dropped = False

    async def drop(self) -> None:
        """Closes the client when its last user is done; nobody may use it anew."""
        self._is_dropped = True
        if not self._num_users:
            await self._client.aclose()

    async def __aenter__(self) -> _Client:
        self._num_users += 1
        return self._client

    async def __aexit__(self, *error: object) -> None:
        self._num_users -= 1
        if self._is_dropped and not self._num_users:
            await self._client.aclose()
