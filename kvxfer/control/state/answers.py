"""Answers by idempotency key: the same key gets the first answer again, also after a restart."""

from __future__ import annotations

import hashlib
import sqlite3
from typing import Final, NamedTuple

from kvxfer.control.problems import Refusal
from kvxfer.control.state.store import Store

#: For how long answers are kept, and how many.
KEPT_S: Final = 24 * 3600.0
MOST: Final = 10_000
#: Longer answers are not kept; no POST has one.
_MOST_NBYTES: Final = 1 << 20


class Answer(NamedTuple):
    """A kept answer."""

    status: int
    body: bytes


def fingerprint(operation: str, path: str, body: bytes) -> str:
    """Returns a digest that is equal for a request and its repetition."""
    return hashlib.sha256(b"\0".join((operation.encode(), path.encode("utf-8", "replace"), body))).hexdigest()


class Answers:
    """The answers in one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._running: set[str] = set()

    async def begin(self, key: str, request: str, now_s: float) -> Answer | None:
        """Returns the answer that this key has had, or None if this is the first request with it.

        After None, call `end`, `abandon` or `forget_running`.

        Raises
        ------
        Refusal
            ``conflict``: the key was used for another request; or the first request is still running, or its
            outcome is unknown, e.g. because the daemon ended.
        """
        if key in self._running:
            raise Refusal("conflict", "a request with this idempotency key is under way", retry_after_s=1)
        self._running.add(key)
        try:
            row = await self._store.run(lambda db: _begin(db, key, request, now_s))
        except BaseException:
            self._running.discard(key)
            raise
        if row is None:
            return None
        self._running.discard(key)
        first, status, body = row
        if first != request:
            raise Refusal("conflict", "this idempotency key was used for another request")
        if status is None:
            raise Refusal(
                "conflict",
                "the first request with this idempotency key was interrupted, and may or may not have "
                "been carried out: check, and use another key",
            )
        return Answer(status, body)

    async def end(self, key: str, answer: Answer) -> None:
        """Keeps an answer."""
        try:
            if len(answer.body) > _MOST_NBYTES:
                return
            await self._store.run(
                lambda db: db.execute("UPDATE answers SET status = ?, body = ? WHERE key = ?", (*answer, key))
            )
        finally:
            self._running.discard(key)

    async def abandon(self, key: str) -> None:
        """Forgets a key whose request did nothing."""
        try:
            await self._store.run(lambda db: db.execute("DELETE FROM answers WHERE key = ?", (key,)))
        except Refusal:
            pass  # the key stays reserved, and answers `conflict`, until it is too old
        finally:
            self._running.discard(key)

    async def forget_running(self, key: str) -> None:
        """Keeps a key whose request failed with an unknown result, so that repeating it is refused."""
        self._running.discard(key)


def _begin(
    db: sqlite3.Connection, key: str, request: str, now_s: float
) -> tuple[str, int | None, bytes] | None:
    row = db.execute("SELECT request, status, body, begun_at_s FROM answers WHERE key = ?", (key,)).fetchone()
    if row is not None and row[3] >= now_s - KEPT_S:
        return row[0], row[1], row[2]
    db.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, NULL, NULL)", (key, now_s, request))
    db.execute("DELETE FROM answers WHERE begun_at_s < ?", (now_s - KEPT_S,))
    db.execute(
        "DELETE FROM answers WHERE key IN "
        "(SELECT key FROM answers ORDER BY begun_at_s DESC LIMIT -1 OFFSET ?)",
        (MOST,),
    )
    return None
