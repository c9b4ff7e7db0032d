"""Answers to idempotency keys: the same key gives the first answer again, over restarts too."""

from __future__ import annotations

import hashlib
import sqlite3
from typing import Final, NamedTuple

from kvxfer.control.problems import Refusal
from kvxfer.control.state.store import Store

#: How long, and how many, are kept.
KEPT_S: Final = 24 * 3600.0
MOST: Final = 10_000
#: Longer answers are not kept: of a POST none is.
_MOST_NBYTES: Final = 1 << 20


class Answer(NamedTuple):
    """What was answered."""

    status: int
    body: bytes


def fingerprint(operation: str, path: str, body: bytes) -> str:
    """Returns what two requests have in common that are one."""
    return hashlib.sha256(b"\0".join((operation.encode(), path.encode("utf-8", "replace"), body))).hexdigest()


class Answers:
    """Of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._running: set[str] = set()

    async def begin(self, key: str, request: str, now_s: float) -> Answer | None:
        """Returns the answer that was given to this key, or None for the first request with it.

        After None comes `end` or `abandon`.

        Raises
        ------
        Refusal
            ``conflict``: another request had this key, or the first one is under way, or was when the daemon
            ended.
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
                "the first request with this idempotency key failed, or the daemon ended, midway: it may be "
                "done or not; look, and use another key",
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
            pass  # it is said to be under way until it is too old
        finally:
            self._running.discard(key)

    async def forget_running(self, key: str) -> None:
        """Leaves a key as one of which it is not known what became of its request."""
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
