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
from pathlib import Path
from typing import Any, Final, TypeVar

from kvxfer.control.problems import Refusal
from kvxfer.log import logger

Result = TypeVar("Result")
Work = Callable[[sqlite3.Connection], Result]

_VERSION: Final = 1
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS documents (kind TEXT, id TEXT, document TEXT NOT NULL, PRIMARY KEY (kind, id))
  WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, begun_at_s REAL NOT NULL, request TEXT NOT NULL,
  status INTEGER, body BLOB);
CREATE INDEX IF NOT EXISTS answers_by_age ON answers (begun_at_s);
CREATE TABLE IF NOT EXISTS parked (key BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS gone (key BLOB PRIMARY KEY) WITHOUT ROWID;
"""
# Changes in one commit, at most. A commit costs one or two writes to disk, however many changes it has.
_MOST_AT_ONCE: Final = 256


class Store:
    """The store's file, and the thread that writes it.

    Parameters
    ----------
    path
        The file; made (0600) if it does not exist.

    Raises
    ------
    RuntimeError
        The file cannot be opened: another daemon has it, it is of another version or damaged, or there is no
        room for it. The message says which.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._queue: queue.SimpleQueue[tuple[Work[Any], Future[Any]] | None] = queue.SimpleQueue()
        #: Why the last change failed; "" if it succeeded.
        self.fault = ""
        # Excludes a second daemon. The lock ends with the process, however the process ends.
        self._lock_fd = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
        path.touch(mode=0o600)
        try:
            self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=5)
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _VERSION):
                raise RuntimeError(
                    f"{path} has version {version}, but this daemon knows only {_VERSION}: put back the copy "
                    "from before the upgrade, or start the newer daemon"
                )
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=FULL")
            self._connection.executescript(_SCHEMA)
            self._connection.execute(f"PRAGMA user_version={_VERSION}")
        except sqlite3.Error as error:
            raise RuntimeError(f"{path} cannot be opened: {error}") from error

    def close(self) -> None:
        """Writes what is waiting, and ends the thread. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
            self._connection.close()
            os.close(self._lock_fd)

    def submit(self, work: Work[Result]) -> Future[Result]:
        """Queues `work`, which the thread runs in a transaction; the future is done after the commit."""
        done: Future[Result] = Future()
        self._queue.put((work, done))
        return done

    async def run(self, work: Work[Result]) -> Result:
        """Runs work on the thread, and waits until it is committed.

        Raises
        ------
        Refusal
            ``unavailable``: the file cannot be written, e.g. the disk is full; nothing was changed.
        """
        try:
            return await asyncio.wrap_future(self.submit(work))
        except sqlite3.Error as error:
            raise Refusal("unavailable", f"the daemon's store cannot be written: {error}") from None

    # ---- documents: small JSON by kind and id ------------------------------------------------------

    def load(self, kind: str) -> dict[str, Any]:
        """Returns all documents of a kind, by id; blocks, so call it only at the start."""
        work: Work[list[tuple[str, str]]] = lambda db: db.execute(  # noqa: E731
            "SELECT id, document FROM documents WHERE kind = ?", (kind,)
        ).fetchall()
        return {id_: json.loads(text) for id_, text in self.submit(work).result()}

    async def put(self, kind: str, id_: str, document: Any) -> None:
        """Stores a document; see `run`."""
        await self.run(putting(kind, id_, document))

    async def remove(self, kind: str, *ids: str) -> None:
        """Removes documents; see `run`."""
        rows = [(kind, id_) for id_ in ids]
        await self.run(lambda db: db.executemany("DELETE FROM documents WHERE kind = ? AND id = ?", rows))

    # ---- keys of pages -----------------------------------------------------------------------------

    def begin_life(self) -> None:
        """Marks pages of the daemon's last run as gone, and forgets those of earlier runs; blocks."""

        def work(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM gone")
            db.execute("INSERT INTO gone SELECT key FROM parked")
            db.execute("DELETE FROM parked")

        self.submit(work).result()

    async def find_gone(self, keys: Sequence[bytes]) -> set[bytes]:
        """Returns the keys that the last run had acknowledged and that are gone now."""
        if not keys:
            return set()

        def work(db: sqlite3.Connection) -> set[bytes]:
            find = "SELECT 1 FROM gone WHERE key = ?"
            return {key for key in keys if db.execute(find, (key,)).fetchone() is not None}

        return await self.run(work)

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
            self._commit([item for item in batch if item and item[1].set_running_or_notify_cancel()])

    def _commit(self, batch: list[tuple[Work[Any], Future[Any]]]) -> None:
        """Runs all work in one transaction; if that fails, runs each in its own."""
        if not batch:
            return
        results: list[Any] = []
        db = self._connection
        try:
            db.execute("BEGIN IMMEDIATE")
            results = [work(db) for work, _ in batch]
            db.execute("COMMIT")
        except Exception as error:
            self._roll_back()
            if len(batch) > 1:
                for item in batch:
                    self._commit([item])
                return
            if str(error) != self.fault:
                self.fault = str(error)
                logger().error("the store %s cannot be written: %s", self._path, error)
            batch[0][1].set_exception(error)
            return
        self.fault = ""
        for (_, done), result in zip(batch, results, strict=True):
            done.set_result(result)

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
