"""The durable state: one SQLite file. One thread writes it, and commits once for all waiting changes.

A change is durable when its call has returned (a commit in WAL mode with ``synchronous=FULL``); it survives
``kill -9`` and a loss of power. Durable are tokens, settings, the drain, entries of the directory, answers to
idempotency keys, keys of acknowledged pages, and the highest event index that may have been given out. By
design these are not durable: agents (they attach again), transfers' records, events, leases, and the pages.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar

from kvxfer.control.schema.problems import Refusal
from kvxfer.control.state.own_files import require_own_file
from kvxfer.control.state.reserve import Reserve
from kvxfer.errors import KvxferError
from kvxfer.log import logger

Result = TypeVar("Result")
Work = Callable[[sqlite3.Connection], Result]
_CURE: Final = (
    "put back a copy of the store (docs/operations.md), or move its files away and start with an empty one"
)
_HAS_DOCUMENTS: Final = "SELECT 1 FROM sqlite_master WHERE name = 'documents'"
_NEW_LIFE: Final = (
    "DELETE FROM gone",
    "INSERT INTO gone SELECT key FROM parked",
    "DELETE FROM parked",
)

_VERSION: Final = 1
_SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS documents (kind TEXT, id TEXT, document TEXT NOT NULL,"
    " PRIMARY KEY (kind, id)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, begun_at_s REAL NOT NULL,"
    " request TEXT NOT NULL, status INTEGER, body BLOB)",
    "CREATE INDEX IF NOT EXISTS answers_by_age ON answers (begun_at_s)",
    "CREATE TABLE IF NOT EXISTS long_answers (key TEXT PRIMARY KEY, digest BLOB NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS parked (key BLOB PRIMARY KEY) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS gone (key BLOB PRIMARY KEY) WITHOUT ROWID",
)
# What SQLite says where the disk is full: also a file beside the store cannot be made then.
_NO_ROOM: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN})
_BESIDE: Final = ("", "-wal", "-shm", "-journal")
#: What work needs: "read" nothing, "room" a disk with room, "reserve" may use the reserve.
Need = Literal["read", "room", "reserve"]
# Changes in one commit, at most. A commit costs one or two writes to disk, however many changes it has.
_MOST_AT_ONCE: Final = 256


class _Item(NamedTuple):
    work: Work[Any]
    done: Future[Any]
    need: Need


class Store:
    """The store's file, and the thread that writes it.

    Parameters
    ----------
    path
        The file; made (0600) if it does not exist.
    reserve
        Room that only work which needs the ``"reserve"`` may use when the disk is full; None for none.

    Raises
    ------
    PermissionError
        The file, or one beside it, is another user's or a link.
    RuntimeError
        The file cannot be opened: another daemon has it, or it is of another version or damaged. The message
        says which.
    """

    def __init__(self, path: Path, reserve: Reserve | None = None) -> None:
        self._path = path
        self._reserve = reserve
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        #: Why the last change failed; "" if it succeeded.
        self.fault = ""
        # Work that the first change does before its own, since the disk may be full at the start.
        self._has_tables, self._has_begun = False, True
        lock = path.with_suffix(".lock")
        for each in (lock, *(path.with_name(f"{path.name}{end}") for end in _BESIDE)):
            require_own_file(each)
        # Excludes a second daemon. The lock ends with the process, however the process ends.
        self._lock_fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._open(path)
        except BlockingIOError:
            os.close(self._lock_fd)
            raise RuntimeError(f"another daemon uses {path.parent}: name another folder (--state)") from None
        except BaseException:
            os.close(self._lock_fd)
            raise
        self._thread = threading.Thread(target=self._run, name="kvxfer-store", daemon=True)
        self._thread.start()

    def _open(self, path: Path) -> None:
        """Opens the file, also on a full disk: then changes are refused until there is room."""
        path.touch(mode=0o600)
        try:
            try:
                self._connect(path)
            except sqlite3.OperationalError as error:
                if not _is_of_room(error):
                    raise
                if self._reserve is not None:
                    self._reserve.give()
                try:
                    self._connect(path)
                except sqlite3.OperationalError as again:
                    if not _is_of_room(again):
                        raise
                    # SQLite's index of its log is then in memory. Other programs cannot read the store.
                    self._connect(path, "EXCLUSIVE")
        except sqlite3.Error as error:
            raise RuntimeError(f"{path} cannot be opened: {error}") from error
        try:
            self._make_tables()
        except sqlite3.OperationalError as error:
            if not _is_of_room(error):
                raise RuntimeError(f"{path} cannot be opened: {error}") from error
            self._note_fault(error)

    def _connect(self, path: Path, locking: str = "NORMAL") -> None:
        self._connection = db = sqlite3.connect(
            path, check_same_thread=False, isolation_level=None, timeout=5
        )
        try:
            db.execute(f"PRAGMA locking_mode={locking}")
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _VERSION):
                raise RuntimeError(
                    f"{path} has version {version}, but this daemon knows only {_VERSION}: put back the copy "
                    "from before the upgrade, or start the newer daemon"
                )
            db.execute("PRAGMA synchronous=FULL")
            db.execute("SELECT name FROM sqlite_master").fetchall()
        except BaseException:
            db.close()
            raise

    def _make_tables(self) -> None:
        """Makes what is missing; writes nothing if nothing is."""
        db = self._connection
        db.execute("PRAGMA journal_mode=WAL")
        for statement in _SCHEMA:
            db.execute(statement)
        if db.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
            db.execute(f"PRAGMA user_version={_VERSION}")
        self._has_tables = True

    def close(self) -> None:
        """Writes what is waiting, and ends the thread. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
            self._connection.close()
            os.close(self._lock_fd)

    def submit(self, work: Work[Result], need: Need = "room") -> Future[Result]:
        """Queues `work`, which the thread runs in a transaction; the future is done after the commit."""
        done: Future[Result] = Future()
        self._queue.put(_Item(work, done, need))
        return done

    async def run(self, work: Work[Result], need: Need = "room") -> Result:
        """Runs work on the thread, and waits until it is committed.

        Raises
        ------
        Refusal
            ``unavailable``: the file cannot be written, e.g. the disk is full; nothing was changed.
        """
        try:
            return await asyncio.wrap_future(self.submit(work, need))
        except sqlite3.Error as error:
            raise Refusal("unavailable", f"the daemon's store cannot be written: {error}") from None

    # ---- documents: small JSON by kind and id ------------------------------------------------------

    def load(
        self, kind: str, read: Callable[[str, Any], Result] = lambda id_, told: told
    ) -> dict[str, Result]:
        """Returns all documents of a kind, by id; blocks, so call it only at the start.

        Parameters
        ----------
        read
            Makes a document what it stands for, by its id.

        Raises
        ------
        RuntimeError
            A document is damaged; the message names the file and the document.
        """
        work: Work[list[tuple[str, str]]] = lambda db: db.execute(  # noqa: E731
            "SELECT id, document FROM documents WHERE kind = ?", (kind,)
        ).fetchall()
        if not self._has_tables and not self._connection.execute(_HAS_DOCUMENTS).fetchall():
            return {}
        found = {}
        id_ = ""
        try:
            for id_, text in self.submit(work, "read").result():
                found[id_] = read(id_, json.loads(text))
        except sqlite3.Error as error:
            raise RuntimeError(f"{self._path} is damaged: {error}: {_CURE}") from None
        except (ValueError, TypeError, LookupError, AttributeError, KvxferError) as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())
            raise RuntimeError(
                f"{self._path} is damaged: its document {kind} {id_!r} cannot be read ({words:.300}): {_CURE}"
            ) from None
        return found

    async def put(self, kind: str, id_: str, document: Any, need: Need = "room") -> None:
        """Stores a document; see `run`."""
        await self.run(putting(kind, id_, document), need)

    async def remove(self, kind: str, *ids: str, need: Need = "room") -> None:
        """Removes documents; see `run`."""
        rows = [(kind, id_) for id_ in ids]
        await self.run(
            lambda db: db.executemany("DELETE FROM documents WHERE kind = ? AND id = ?", rows), need
        )

    # ---- keys of pages -----------------------------------------------------------------------------

    def begin_life(self) -> None:
        """Marks pages of the daemon's last run as gone, and forgets those of earlier runs; blocks.

        On a full disk the first later change does it.
        """
        self._has_begun = False
        with suppress(sqlite3.OperationalError):  # logged
            self.submit(lambda db: None).result()

    async def find_gone(self, keys: Sequence[bytes]) -> set[bytes]:
        """Returns the keys that the last run had acknowledged and that are gone now."""
        if not keys or not self._has_tables:
            return set()

        def work(db: sqlite3.Connection) -> set[bytes]:
            find = f"SELECT 1 FROM {'gone' if self._has_begun else 'parked'} WHERE key = ?"
            return {key for key in keys if db.execute(find, (key,)).fetchone() is not None}

        return await self.run(work, "read")

    async def add_parked(self, keys: Iterable[bytes]) -> None:
        """Stores keys of pages before the pages are acknowledged; see `run`."""
        rows = [(key,) for key in keys]

        def work(db: sqlite3.Connection) -> None:
            db.executemany("INSERT OR IGNORE INTO parked VALUES (?)", rows)
            db.executemany("DELETE FROM gone WHERE key = ?", rows)

        await self.run(work)

    def drop_parked(self, keys: Iterable[bytes]) -> None:
        """Forgets keys later; if that fails, these pages are reported as gone after a restart."""
        rows = [(key,) for key in keys]
        self.submit(lambda db: db.executemany("DELETE FROM parked WHERE key = ?", rows))

    # ---- inside ------------------------------------------------------------------------------------

    def _run(self) -> None:
        going = True
        while going:
            batch = [self._queue.get()]
            while len(batch) < _MOST_AT_ONCE and not self._queue.empty():
                batch.append(self._queue.get())
            going = None not in batch
            # A change whose caller was cancelled while it waited is left out; from here on it is made.
            self._commit([item for item in batch if item and item.done.set_running_or_notify_cancel()])

    def _commit(self, batch: list[_Item]) -> None:
        """Runs all work in one transaction; if that fails, runs each in its own."""
        if self._reserve is not None and not self._reserve.take():
            # What is left on the disk is for other changes.
            error = sqlite3.OperationalError("the disk is full")
            for item in batch:
                if item.need == "room":
                    self._note_fault(error)
                    item.done.set_exception(error)
            batch = [item for item in batch if item.need != "room"]
        if not batch:
            return
        writes = any(item.need != "read" for item in batch)
        results: list[Any] = []
        db = self._connection
        try:
            if writes and not self._has_tables:
                self._make_tables()
            db.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            if writes and not self._has_begun:
                for statement in _NEW_LIFE:
                    db.execute(statement)
            results = [item.work(db) for item in batch]
            db.execute("COMMIT")
        except Exception as error:
            self._roll_back()
            if len(batch) > 1:
                for item in batch:
                    self._commit([item])
                return
            (item,) = batch
            if item.need == "reserve" and self._reserve is not None and self._reserve.give():
                self._commit(batch)
                return
            self._note_fault(error)
            item.done.set_exception(error)
            return
        if writes:
            self.fault, self._has_begun = "", True
        for item, result in zip(batch, results, strict=True):
            item.done.set_result(result)

    def _note_fault(self, error: Exception) -> None:
        if str(error) != self.fault:
            self.fault = str(error)
            logger().error("the store %s cannot be written: %s", self._path, error)

    def _roll_back(self) -> None:
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            pass  # SQLite has already rolled back


def putting(kind: str, id_: str, document: Any) -> Work[Any]:
    """Returns the work that stores a document."""
    text = json.dumps(document)
    return lambda db: db.execute("INSERT OR REPLACE INTO documents VALUES (?, ?, ?)", (kind, id_, text))


def _is_of_room(error: sqlite3.OperationalError) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _NO_ROOM


def number(id_: str, told: Any) -> int | float:
    """Reads a document that is a number: see `Store.load`."""
    if not isinstance(told, int | float) or isinstance(told, bool):
        raise TypeError("it is no number")
    return told
