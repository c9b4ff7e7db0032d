"""A directory that a node's daemon keeps, for agents of a few nodes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from kvxfer.control import schema
from kvxfer.control.client import client_calls as calls
from kvxfer.control.client.client_calls import Call
from kvxfer.control.client.client_error import ControlError
from kvxfer.control.client.client_events import Missed
from kvxfer.control.client.client_exchange import Retry
from kvxfer.control.client.rest_client import AsyncClient
from kvxfer.directory.distant import Snapshot, Update
from kvxfer.directory.entry import Entry
from kvxfer.directory.mirrored import KEEP_EVERY_S, MirroredDirectory
from kvxfer.directory.shared_client import SharedClient
from kvxfer.errors import PeerError, UsageError, invalid

_TOPIC: Final = "directory"
# Two calls of `keep` may fail, and the third still comes in time.
_OWN_TTL_S: Final = 3 * KEEP_EVERY_S + 1.0
_MOST_AT_ONCE: Final = 250
# A daemon that does not answer for this long counts as stopped or cut off.
_ANSWER_S: Final = 3.0
_Answer = TypeVar("_Answer")


class DaemonDirectory(MirroredDirectory):
    """A `kvxfer.directory.Directory` at one daemon, with a local copy: see `MirroredDirectory`.

    The daemon keeps entries over its restarts. The token needs the role ``transfer``.

    Parameters
    ----------
    daemon, token, verify, certificate
        As for `kvxfer.control.Client`.
    """

    def __init__(
        self,
        daemon: str | os.PathLike[str] | None = None,
        *,
        token: str | None = None,
        verify: str | bool = True,
        certificate: tuple[str, str] | None = None,
    ) -> None:
        super().__init__(DaemonEntries(daemon, token=token, verify=verify, certificate=certificate))


class DaemonEntries:
    """The entries at one daemon; see `kvxfer.directory.distant.Distant`."""

    def __init__(self, daemon: str | os.PathLike[str] | None, **access: Any) -> None:
        self._daemon = daemon
        self._access = access
        client = self._connected()
        self.where = str(client.address)
        self._client = SharedClient(client)
        # Entries that were published without a time; this object gives them one and renews it.
        self._kept: dict[str, bytes] = {}

    def _connected(self) -> AsyncClient:
        return AsyncClient(self._daemon, retry=Retry(attempts=1), **self._access)

    async def snapshot(self) -> Snapshot:
        """Returns all entries."""
        entries: dict[str, Entry] = {}
        page = await self._asked(calls.list_entries(limit=_MOST_AT_ONCE))
        index = page.index
        while True:
            entries |= {each.name: _entry(each) for each in page.items}
            if page.next is None:
                return Snapshot(entries, index)
            page = await self._asked(calls.list_entries(cursor=page.next, limit=_MOST_AT_ONCE))

    async def updates(self, after: int) -> AsyncIterator[Sequence[Update]]:
        """Yields changes after an index."""
        try:
            async with self._client as client:
                async for event in client.events(topic=[_TOPIC], after=after, reconnect=False):
                    if isinstance(event, Missed):
                        return
                    told = _entry(schema.Entry.model_validate(dict(event.data)))
                    is_there = event.topic != f"{_TOPIC}.removed"
                    yield [Update(told.name, told if is_there else None, event.index)]
        except ControlError as error:
            raise _unreachable(error) from error

    async def publish(self, entry: Entry, ttl_s: float | None, replace: bool) -> int | None:
        """Publishes `entry`, unless it may not replace another incarnation's entry."""
        try:
            asked = schema.EntryPublication(
                name=entry.name,
                address=entry.address,
                incarnation=entry.incarnation.hex(),
                metadata=dict(entry.metadata),
                ttl_s=_OWN_TTL_S if ttl_s is None else ttl_s,
                replace=replace,
            )
        except ValidationError as error:
            raise _not_taken(error) from None
        answer = await self._asked(calls.publish_entry(asked))
        if answer.published and ttl_s is None:
            self._kept[entry.name] = entry.incarnation
        else:
            self._kept.pop(entry.name, None)
        return answer.index if answer.published else None

    async def withdraw(self, name: str, incarnation: bytes) -> int:
        """Removes the entry if it belongs to this incarnation."""
        if self._kept.get(name) == incarnation:
            del self._kept[name]
        answer = await self._asked(calls.withdraw_entry(name, incarnation.hex()))
        return answer.index

    async def keep(self) -> bool:
        """Renews entries that were published without a time; without any, checks that the daemon answers."""
        if not self._kept:
            await self._asked(calls.list_entries(limit=1))
            return True
        lost: list[str] = []
        names = list(self._kept.items())
        for first in range(0, len(names), _MOST_AT_ONCE):
            part = names[first : first + _MOST_AT_ONCE]
            entries = [schema.EntryKept(name=name, incarnation=life.hex()) for name, life in part]
            answer = await self._asked(calls.keep_entries(schema.EntriesKept(entries=entries)))
            lost += answer.lost
        return not lost

    async def renew(self) -> None:
        """Drops connections, each when the calls on it are done."""
        before, self._client = self._client, SharedClient(self._connected())
        await before.drop()

    async def close(self) -> None:
        """Withdraws entries that were published without a time."""
        try:
            for name, incarnation in tuple(self._kept.items()):
                await self.withdraw(name, incarnation)
        finally:
            await self._client.drop()

    async def _asked(self, call: Call[_Answer]) -> _Answer:
        try:
            async with self._client as client:
                return await client.call(replace(call, timeout_s=_ANSWER_S))
        except ControlError as error:
            raise _unreachable(error) from error


def _not_taken(error: ValidationError) -> UsageError:
    """Returns the error of an entry that an agent may have, and that the daemon does not take."""
    first = error.errors()[0]
    field = first["loc"][0] if first["loc"] else "entry"
    said = f"the daemon's directory does not take {field} {first['input']!r:.300}: {first['msg']}"
    if field == "ttl_s":
        said += " (option directory_ttl_s)"
    return invalid(said)


def _unreachable(error: ControlError) -> PeerError:
    return PeerError(f"the daemon's directory: {error}", code="unreachable")


def _entry(told: schema.Entry) -> Entry:
    return Entry(told.name, told.address, bytes.fromhex(told.incarnation), told.metadata)
