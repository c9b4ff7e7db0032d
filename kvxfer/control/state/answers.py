"""Answers by idempotency key: the same key gets the first answer again, also after a restart."""

from __future__ import annotations

import hashlib
import sqlite3
from typing import Final, NamedTuple

from kvxfer.control.schema.problems import Refusal
from kvxfer.control.state.store import Store
from kvxfer.log import logger

#: For how long answers are kept.
KEPT_S: Final = 24 * 3600.0
#: How many of each caller, and of all callers together: a caller with more than its share loses its oldest.
MOST_EACH: Final = 10_000
MOST: Final = 200_000
#: Bytes of their bodies. Beyond, the oldest bodies are replaced by their digests.
MOST_EACH_NBYTES: Final = 32 << 20
MOST_NBYTES: Final = 256 << 20
#: Of a longer body only the digest is kept.
LONG_NBYTES: Final = 1 << 20
# Replacing a shorter one by its digest gains nothing.
_SHORT_NBYTES: Final = 256
# After how many answers, or bytes, of one caller its bounds are looked at; and those of all.
_LOOK_EACH: Final = 100
_LOOK_EACH_NBYTES: Final = 1 << 20
_LOOK: Final = 2000
_LOOK_NBYTES: Final = 16 << 20

#: The caller's key, and the key that it has sent.
Key = tuple[str, str]


class Answer(NamedTuple):
    """A kept answer; with a `digest` (SHA-256) the body was too long to be kept."""

    status: int
    body: bytes
    digest: bytes = b""


def fingerprint(operation: str, path: str, body: bytes) -> str:
    """Returns a digest that is equal for a request and its repetition."""
    return hashlib.sha256(b"\0".join((operation.encode(), path.encode("utf-8", "replace"), body))).hexdigest()


class Answers:
    """The answers in one store. Callers take no room from each other."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._running: set[str] = set()
        # By caller, and "" for all: keys and bytes since the bounds were last looked at.
        self._since: dict[str, tuple[int, int]] = {"": (_LOOK, 0)}

    async def begin(self, key: Key, request: str, now_s: float) -> Answer | None:
        """Returns the answer that this key has had, or None if this is the first request with it.

        After None, call `end`, `abandon` or `forget_running`.

        Raises
        ------
        Refusal
            ``conflict``: the key was used for another request; or the first request is still running, or its
            outcome is unknown, e.g. because the daemon ended. ``unavailable``: it cannot be stored.
        """
        row_key = " ".join(key)
        if row_key in self._running:
            raise Refusal("conflict", "a request with this idempotency key is under way", retry_after_s=1)
        self._running.add(row_key)
        try:
            row = await self._store.run(lambda db: _begin(db, row_key, request, now_s))
        except BaseException:
            self._running.discard(row_key)
            raise
        if row is None:
            return None
        self._running.discard(row_key)
        first, status, body, digest = row
        if first != request:
            raise Refusal("conflict", "this idempotency key was used for another request")
        if status is None:
            raise Refusal(
                "conflict",
                "the first request with this idempotency key was interrupted, and may or may not have "
                "been carried out: check, and use another key",
            )
        return Answer(status, body or b"", digest or b"")

    async def end(self, key: Key, answer: Answer) -> None:
        """Keeps an answer, and looks at the bounds now and then."""
        row_key = " ".join(key)
        try:
            looks = self._count(key[0], len(answer.body))
            running = frozenset(self._running)

            def work(db: sqlite3.Connection) -> None:
                db.execute(
                    "UPDATE answers SET status = ?, body = ? WHERE key = ?",
                    (answer.status, answer.body, row_key),
                )
                if len(answer.body) > LONG_NBYTES:
                    _shorten(db, row_key)
                for caller in looks:
                    if caller:
                        _bound(db, caller, running, MOST_EACH, MOST_EACH_NBYTES)
                    else:
                        _bound_all(db, running)

            await self._store.run(work)
        except Refusal as error:
            # It was carried out, so its caller gets the answer; a repetition is told that it is not known.
            logger().warning("an answer was not kept for a repetition of its request: %s", error.detail)
        finally:
            self._running.discard(row_key)

    async def abandon(self, key: Key) -> None:
        """Forgets a key whose request did nothing."""
        row_key = " ".join(key)
        try:
            await self._store.run(lambda db: db.execute("DELETE FROM answers WHERE key = ?", (row_key,)))
        except Refusal:
            pass  # the key stays reserved, and answers `conflict`, until it is too old
        finally:
            self._running.discard(row_key)

    async def forget_running(self, key: Key) -> None:
        """Keeps a key whose request failed with an unknown result, so that repeating it is refused."""
        self._running.discard(" ".join(key))

    def _count(self, caller: str, nbytes: int) -> list[str]:
        """Counts an answer; returns the caller, and "" for all, if their bounds are to be looked at."""
        looks = []
        for whose, most, most_nbytes in (
            (caller, _LOOK_EACH, _LOOK_EACH_NBYTES),
            ("", _LOOK, _LOOK_NBYTES),
        ):
            # A caller of an earlier run is looked at with its first answer.
            keys, sum_nbytes = self._since.get(whose, (most, 0))
            self._since[whose] = (keys + 1, sum_nbytes + nbytes)
            if keys + 1 >= most or sum_nbytes + nbytes >= most_nbytes:
                self._since[whose] = (0, 0)
                looks.append(whose)
        return looks


Row = tuple[str, int | None, bytes | None, bytes | None]


def _begin(db: sqlite3.Connection, key: str, request: str, now_s: float) -> Row | None:
    row = db.execute(
        "SELECT request, status, body, digest, begun_at_s FROM answers LEFT JOIN long_answers USING (key)"
        " WHERE key = ?",
        (key,),
    ).fetchone()
    if row is not None and row[4] >= now_s - KEPT_S:
        return row[0], row[1], row[2], row[3]
    db.execute("DELETE FROM long_answers WHERE key = ?", (key,))
    db.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, NULL, NULL)", (key, now_s, request))
    old = (now_s - KEPT_S,)
    db.execute("DELETE FROM long_answers WHERE key IN (SELECT key FROM answers WHERE begun_at_s < ?)", old)
    db.execute("DELETE FROM answers WHERE begun_at_s < ?", old)
    return None


def _shorten(db: sqlite3.Connection, key: str) -> None:
    """Replaces a body by its digest."""
    (body,) = db.execute("SELECT body FROM answers WHERE key = ?", (key,)).fetchone()
    db.execute("INSERT OR REPLACE INTO long_answers VALUES (?, ?)", (key, hashlib.sha256(body).digest()))
    db.execute("UPDATE answers SET body = NULL WHERE key = ?", (key,))


def _bound(db: sqlite3.Connection, caller: str, running: frozenset[str], most: int, most_nbytes: int) -> None:
    """Keeps a caller's newest keys, and of these the newest bodies; a key that is running stays."""
    rows = db.execute(
        "SELECT key, coalesce(length(body), 0) FROM answers WHERE key > ? AND key < ?"
        " ORDER BY begun_at_s DESC",
        (f"{caller} ", f"{caller}!"),  # "!" follows the space
    ).fetchall()
    for key, _ in rows[most:]:
        if key not in running:
            db.execute("DELETE FROM long_answers WHERE key = ?", (key,))
            db.execute("DELETE FROM answers WHERE key = ?", (key,))
    for key, nbytes in rows[:most]:
        most_nbytes -= nbytes
        if most_nbytes < 0 and nbytes > _SHORT_NBYTES:
            _shorten(db, key)


def _bound_all(db: sqlite3.Connection, running: frozenset[str]) -> None:
    """Bounds all callers together, by taking from those that have the most."""
    shares = db.execute(
        "SELECT substr(key, 1, instr(key, ' ') - 1) AS caller, count(*), coalesce(sum(length(body)), 0)"
        " FROM answers GROUP BY caller"
    ).fetchall()
    most = _level([keys for _, keys, _ in shares], MOST)
    most_nbytes = _level([nbytes for _, _, nbytes in shares], MOST_NBYTES)
    for caller, keys, nbytes in shares:
        if keys > most or nbytes > most_nbytes:
            _bound(db, caller, running, most, most_nbytes)


def _level(shares: list[int], most: int) -> int:
    """Returns the largest share at which all shares, cut to it, are `most` together at most."""
    left, num_left = most, len(shares)
    for share in sorted(shares):
        if share * num_left > left:
            return left // num_left
        left, num_left = left - share, num_left - 1
    return most
