"""A remote directory with a local copy of its entries, from which look-ups are answered."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from kvxfer.directory.change import Change
from kvxfer.directory.distant import Distant, Snapshot
from kvxfer.directory.entry import Entry
from kvxfer.directory.in_process import InProcessDirectory
from kvxfer.errors import NoAnswerError, PeerError, invalid
from kvxfer.log import logger
from kvxfer.loop_thread import LoopThread

_T = TypeVar("_T")

#: Interval of checks that the remote end answers, and of renewals of entries without a `ttl_s`.
KEEP_EVERY_S: Final = 3.0
# Longer than any call to the remote end takes; these calls have limits of their own.
_CALL_S: Final = 15.0
# How long `list` waits for the first answer.
_FIRST_ANSWER_S: Final = 5.0
# Revisions of removed names are kept until there are this many more revisions than names.
_SPARE_REVISIONS: Final = 1024
# Pause between attempts to reconnect; up to half longer, so that agents do not come all at once.
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 1.0


class MirroredDirectory:
    """A `Directory` whose entries are in another process.

    One thread follows the remote end and keeps a copy. `list`, `resolve` and `watch` read the copy: a look-up
    costs as much as one in a dictionary. It also works while the remote end is away, with the last known
    entries. An outdated entry cannot lead to a wrong agent, because it names an incarnation and
    `Agent.connect` refuses any other. Writes wait for the remote end's answer, and are then in the copy.

    An entry that is published without a `ttl_s` is kept until `close`. If the remote end loses it, it is
    published again, unless another agent has taken the name. The entries of a process that dies without
    `close` are removed in seconds.

    Parameters
    ----------
    distant
        The remote end. Only this object may call it.
    """

    def __init__(self, distant: Distant) -> None:
        self._distant = distant
        self._copy = InProcessDirectory()
        self._known: dict[str, Entry] = {}
        self._kept: dict[str, Entry] = {}  # published here without a time
        # Revision by name that was applied last in this contact: answers to writes and updates come in any
        # order.
        self._revisions: dict[str, int] = {}
        self._num_writing = 0
        self._answered = threading.Event()
        self._lost_at: float | None = time.monotonic()
        self._why = "it has not answered yet"
        self._closed = False
        self._following: asyncio.Task[None] | None = None
        self._thread = LoopThread("kvxfer-directory")
        self._thread.start(self._begin())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._distant.where}{f', {why}' if (why := self.away) else ''}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def away(self) -> str:
        """A message that says since when and why the remote end does not answer; ``""`` while it answers."""
        if (since := self._lost_at) is None:
            return ""
        return f"silent for {time.monotonic() - since:.1f} s: {self._why}"

    def close(self) -> None:
        """Removes entries that were published here without a `ttl_s`, and stops following. Idempotent.

        Calls that wait for a name or a change raise `PeerError`. Close the agents that use this directory
        first: they withdraw their entries.
        """
        if self._closed:
            return
        self._closed = True
        with suppress(PeerError):
            self._call(self._end())
        self._thread.close(_CALL_S)
        self._copy.end(f"the directory at {self._distant.where} was closed")

    # ---- Directory --------------------------------------------------------------------------

    def publish(self, entry: Entry, ttl_s: float | None = None, *, replace: bool = True) -> bool:
        """Makes `entry` the one of its name at the remote end and in the copy."""
        # `not >`: NaN is no time either.
        if ttl_s is not None and not ttl_s > 0:
            raise invalid(f"ttl_s must be a positive number of seconds, not {ttl_s!r}")
        return self._call(self._publish(entry, ttl_s, replace))

    def withdraw(self, name: str, incarnation: bytes) -> None:
        """Removes the entry of `name` at the remote end if it is this incarnation's."""
        self._call(self._withdraw(name, incarnation))

    async def resolve(self, name: str, timeout_s: float) -> Entry:
        """Returns the entry of `name`, waiting for it to be published."""
        try:
            return await self._copy.resolve(name, timeout_s)
        except PeerError as error:
            raise self._with_reason(error) from None

    def resolve_blocking(self, name: str, timeout_s: float) -> Entry:
        """Returns the entry of `name`, blocking until it is published."""
        try:
            return self._copy.resolve_blocking(name, timeout_s)
        except PeerError as error:
            raise self._with_reason(error) from None

    def list(self, prefix: str = "") -> tuple[Entry, ...]:
        """Returns the entries whose names begin with `prefix`, in the order of their names.

        The result is the last known state. Before the remote end's first answer the call waits for up to five
        seconds.
        """
        if not self._answered.wait(_FIRST_ANSWER_S):
            raise NoAnswerError(f"the directory at {self._distant.where} is {self.away}", code="no-answer")
        return self._copy.list(prefix)

    def watch(self, prefix: str = "", timeout_s: float | None = None) -> AsyncIterator[Change]:
        """Yields changes of entries whose names begin with `prefix`, for one reader."""
        return self._copy.watch(prefix, timeout_s)

    def watch_blocking(self, prefix: str = "", timeout_s: float | None = None) -> Iterator[Change]:
        """Yields the same, blocking until there are any."""
        return self._copy.watch_blocking(prefix, timeout_s)

    def _with_reason(self, error: PeerError) -> PeerError:
        if not (away := self.away):
            return error
        words = f"{error.args[0]}; the directory at {self._distant.where} is {away}"
        return type(error)(words, code=error.code, peer=error.peer)

    # ---- writes, on the loop ----------------------------------------------------------------

    def _call(self, call: Coroutine[Any, Any, _T]) -> _T:
        if not self._thread.is_running:
            call.close()
            raise PeerError(f"the directory at {self._distant.where} was closed", code="unreachable")
        try:
            return self._thread.call(call, _CALL_S)
        except TimeoutError:
            raise NoAnswerError(
                f"the directory at {self._distant.where} did not answer within {_CALL_S:g} s",
                code="no-answer",
            ) from None

    async def _publish(self, entry: Entry, ttl_s: float | None, replace: bool) -> bool:
        with self._writing():
            revision = await self._thread.answer(self._distant.publish(entry, ttl_s, replace))
            if revision is None or ttl_s is not None:
                self._kept.pop(entry.name, None)
            else:
                self._kept[entry.name] = entry
            if revision is not None:
                self._apply(entry.name, entry, revision)
            return revision is not None

    async def _withdraw(self, name: str, incarnation: bytes) -> None:
        kept = self._kept.get(name)
        if kept is not None and kept.incarnation == incarnation:
            del self._kept[name]  # even without an answer: the entry ends with its lease
        with self._writing():
            revision = await self._thread.answer(self._distant.withdraw(name, incarnation))
            known = self._known.get(name)
            if known is not None and known.incarnation == incarnation:
                self._apply(name, None, revision)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._num_writing += 1
        try:
            yield
        finally:
            self._num_writing -= 1

    # ---- following, on the loop -------------------------------------------------------------

    async def _one_contact(self) -> None:
        """Follows the remote end from a snapshot on; raises when the remote end does not answer any more."""
        await self._keep_all()
        self._revisions.clear()  # another server may count from the start
        snapshot = await self._thread.answer(self._distant.snapshot())
        self._take(snapshot)
        self._heard()
        tasks = (
            asyncio.ensure_future(self._take_updates(snapshot.revision)),
            asyncio.ensure_future(self._go_on_keeping()),
        )
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def _take_updates(self, after: int) -> None:
        async for updates in self._distant.updates(after):
            for update in updates:
                self._apply(update.name, update.entry, update.revision)

    async def _go_on_keeping(self) -> None:
        while True:
            await asyncio.sleep(KEEP_EVERY_S)
            await self._keep_all()

    async def _keep_all(self) -> None:
        if await self._thread.answer(self._distant.keep()):
            return
        for entry in tuple(self._kept.values()):
            if await self._thread.answer(self._distant.publish(entry, None, replace=False)) is None:
                self._is_taken(entry)

    def _take(self, snapshot: Snapshot) -> None:
        for name in self._known.keys() - snapshot.entries.keys():
            self._apply(name, None, snapshot.revision)
        for name, entry in snapshot.entries.items():
            self._apply(name, entry, snapshot.revision)

    def _apply(self, name: str, entry: Entry | None, revision: int) -> None:
        if revision < self._revisions.get(name, 0):
            return
        self._revisions[name] = revision
        if len(self._revisions) > len(self._known) + _SPARE_REVISIONS and not self._num_writing:
            self._revisions = {each: self._revisions[each] for each in self._known if each in self._revisions}
        if entry is None:
            if (known := self._known.pop(name, None)) is not None:
                self._copy.withdraw(name, known.incarnation)
            return
        self._known[name] = entry
        self._copy.publish(entry)
        if (kept := self._kept.get(name)) is not None and kept.incarnation != entry.incarnation:
            self._is_taken(kept)

    def _is_taken(self, entry: Entry) -> None:
        if self._kept.pop(entry.name, None) is not None:
            logger().warning("kvxfer: another agent took the name %s in the directory", entry.name)

    def _heard(self) -> None:
        if self._answered.is_set() and self._lost_at is not None:
            logger().info("kvxfer: the directory at %s answers again", self._distant.where)
        self._lost_at = None
        self._answered.set()

    def _lost(self, error: Exception) -> None:
        words = str(error.args[0]) if isinstance(error, PeerError) else f"{type(error).__name__}: {error}"
        if self._lost_at is None:
            self._lost_at = time.monotonic()
            logger().warning("kvxfer: %s; the last known entries of the directory stay in use", words)
        self._why = words

    async def _begin(self) -> None:
        self._following = asyncio.ensure_future(self._follow())

    async def _follow(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await self._one_contact()  # returns if a new snapshot is necessary
            except Exception as error:
                if self._lost_at is None:
                    pause_s = _FIRST_PAUSE_S
                self._lost(error)
                await self._distant.renew()
            # In either case, so that a remote end that always refuses costs little.
            await asyncio.sleep(pause_s * random.uniform(1.0, 1.5))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _end(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
            await self._thread.all_answered()
        await self._distant.close()
