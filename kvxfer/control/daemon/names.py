"""The daemon's directory: durable entries by name, each with its time; changes are events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

from kvxfer.control import schema
from kvxfer.control.schema.problems import Refusal
from kvxfer.control.state.store import Store
from kvxfer.directory import Change, ChangeKind, Entry, InProcessDirectory
from kvxfer.errors import UsageError
from kvxfer.log import logger

_KIND: Final = "entry"
_TOPICS: Final = {kind: f"directory.{kind}" for kind in ChangeKind}
#: How many entries there may be; a cluster has fewer agents.
MOST: Final = 4096


class Names:
    """Keeps the entries. An entry and its time are durable when its publication is answered.

    After a restart each entry has its whole time again, in which its agent has to renew it. An entry without
    a time stays until it is withdrawn.

    Parameters
    ----------
    store
        Where the entries are kept.
    note
        Adds an event.
    last_index
        Returns the index of the last event.
    """

    def __init__(
        self, store: Store, note: Callable[[str, dict[str, Any]], None], last_index: Callable[[], int]
    ) -> None:
        self._store = store
        self._note = note
        self._last_index = last_index
        self._entries = InProcessDirectory(time.monotonic)
        self._ttls: dict[str, float | None] = {}
        self._held: dict[str, Entry] = {}
        self._news = self._entries.watch_blocking("", 0.0)
        # The store's changes have the order of the entries' changes.
        self._writing = asyncio.Lock()

    def load(self) -> None:
        """Restores the kept entries; blocks, so call it only at the start."""
        for name, (entry, ttl_s) in self._store.load(_KIND, _kept).items():
            self._ttls[name] = ttl_s
            self._entries.publish(entry, ttl_s)
        self._tell()

    def shown(self, prefix: str, after: str, limit: int) -> schema.DirectoryEntries:
        """Returns entries after a name whose names begin with `prefix`."""
        self._tell()
        index = self._last_index()
        found = [entry for entry in self._entries.list(prefix) if entry.name > after]
        return schema.DirectoryEntries(
            items=[_shown(entry) for entry in found[:limit]],
            next=found[limit - 1].name if len(found) > limit else None,
            index=index,
        )

    async def publish(self, asked: schema.EntryPublication) -> schema.EntryPublished:
        """Publishes an entry, unless it may not replace another incarnation's entry."""
        try:
            entry = Entry(asked.name, asked.address, bytes.fromhex(asked.incarnation), asked.metadata)
        except UsageError as error:
            raise Refusal("out-of-range", str(error.args[0])) from None
        async with self._writing:
            self._tell()
            held = self._held.get(entry.name)
            if held is None and len(self._held) >= MOST:
                raise Refusal("exhausted", f"{MOST} agents are in the directory")
            if held is not None and held.incarnation != entry.incarnation and not asked.replace:
                return schema.EntryPublished(published=False, index=self._last_index())
            if held != entry or self._ttls.get(entry.name) != asked.ttl_s:
                await self._store.put(_KIND, entry.name, {"entry": entry.to_dict(), "ttl_s": asked.ttl_s})
            self._ttls[entry.name] = asked.ttl_s
            self._entries.publish(entry, asked.ttl_s)
            self._tell()
        return schema.EntryPublished(published=True, index=self._last_index())

    def keep(self, asked: schema.EntriesKept) -> schema.EntriesLost:
        """Starts the time of entries anew; returns the names whose entries are missing."""
        self._tell()
        lost = []
        for each in asked.entries:
            held = self._held.get(each.name)
            if held is None or held.incarnation.hex() != each.incarnation:
                lost.append(each.name)
            else:
                self._entries.publish(held, self._ttls[each.name])
        return schema.EntriesLost(lost=lost)

    async def withdraw(self, name: str, incarnation: str | None) -> schema.EntryPublished:
        """Removes the entry if it belongs to this incarnation; None for any incarnation."""
        async with self._writing:
            self._tell()
            held = self._held.get(name)
            if held is not None and incarnation in (None, held.incarnation.hex()):
                await self._store.remove(_KIND, name)
                del self._ttls[name]
                self._entries.withdraw(name, held.incarnation)
                self._tell()
        return schema.EntryPublished(published=False, index=self._last_index())

    async def forget_ended(self) -> None:
        """Removes entries when their time is over, with an event for each; runs until it is cancelled."""
        ends = self._entries.watch()
        while True:
            await anext(ends)
            async with self._writing:
                self._tell()
                for name in self._ttls.keys() - self._held.keys():
                    del self._ttls[name]
                    try:
                        await self._store.remove(_KIND, name)
                    except Refusal as error:
                        logger().warning(
                            "the removal of %s was not stored, so that it returns when the daemon "
                            "restarts: %s",
                            name,
                            error,
                        )

    # ---- inside -----------------------------------------------------------------------------

    def _tell(self) -> None:
        """Adds events for all changes."""
        try:
            while True:
                change: Change = next(self._news)
                if change.kind is ChangeKind.REMOVED:
                    del self._held[change.entry.name]
                else:
                    self._held[change.entry.name] = change.entry
                self._note(_TOPICS[change.kind], _shown(change.entry).model_dump())
        except TimeoutError:
            return


def _kept(name: str, told: Any) -> tuple[Entry, float | None]:
    ttl_s = told["ttl_s"]
    return Entry.from_dict(told["entry"]), None if ttl_s is None else float(ttl_s)


def _shown(entry: Entry) -> schema.Entry:
    return schema.Entry(
        name=entry.name,
        address=entry.address,
        incarnation=entry.incarnation.hex(),
        metadata=dict(entry.metadata),
    )
