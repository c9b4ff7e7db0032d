"""Publishes an agent's entry in a directory, renews it if it has a time to live, and withdraws it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvxfer.errors import NoAnswerError
from kvxfer.log import logger
from kvxfer.threads import start_thread

if TYPE_CHECKING:
    from concurrent.futures import Future

    from kvxfer.directory import Directory, Entry

# Two renewals may fail; the third still comes in time.
_RENEWALS_IN_TTL: Final = 3


class Publication:
    """Keeps one entry in a directory, from `begin` to `end`, on threads of its own.

    Each call to the directory runs on a thread, after the previous call. So a call that never returns delays
    no caller, and the last call undoes a late one. Between calls there is no thread, unless the entry is
    renewed.

    Parameters
    ----------
    directory, entry
        Where to publish, and what.
    ttl_s
        Time after which the directory removes the entry; None for never.
    """

    def __init__(self, directory: Directory, entry: Entry, ttl_s: float | None) -> None:
        self._directory = directory
        self._entry = entry
        self._ttl_s = ttl_s
        self._stop = threading.Event()
        self._publishing: threading.Thread | None = None
        self._ended = False
        # A dropped agent counts as dead: its entry ends with its time to live.
        weakref.finalize(self, self._stop.set)

    def begin(self, timeout_s: float) -> None:
        """Publishes the entry.

        Raises
        ------
        NoAnswerError
            ``no-answer``: the directory did not take it in time.
        Exception
            What the directory raised.
        """
        self._publishing, published = _started(
            "kvxfer-publish",
            _published(self._directory, self._entry, self._ttl_s),
            _renewed(self._directory, self._entry, self._ttl_s, self._stop),
        )
        try:
            published.result(timeout_s)
        except TimeoutError:
            if published.done():
                raise
            raise NoAnswerError(
                f"the directory did not store the entry of {self._entry.name} within {timeout_s:g} s "
                "(option connect_timeout_s)",
                code="no-answer",
            ) from None

    def end(self, timeout_s: float) -> None:
        """Withdraws the entry. If that takes longer than `timeout_s`, it goes on in its thread. Idempotent.

        Raises
        ------
        Exception
            What the directory raised within the time. Later errors go to the log.
        """
        if self._ended:
            return
        self._ended = True
        self._stop.set()
        directory, entry, publishing = self._directory, self._entry, self._publishing

        def withdraw() -> None:
            if publishing is not None:
                publishing.join()
            directory.withdraw(entry.name, entry.incarnation)

        try:
            _, withdrawn = _started("kvxfer-withdraw", withdraw)
        except RuntimeError as error:  # the interpreter is ending and starts no threads
            logger().warning("kvxfer: %s stays in its directory: %s", entry.name, error)
            return
        try:
            withdrawn.result(timeout_s)
        except TimeoutError:
            if withdrawn.done():
                raise
            logger().warning(
                "kvxfer: %s is closed, but its directory did not remove its entry within the timeout "
                "of close(); the removal continues",
                entry.name,
            )
            withdrawn.add_done_callback(lambda late: _log_late(entry.name, late))


def _published(directory: Directory, entry: Entry, ttl_s: float | None) -> Callable[[], object]:
    return lambda: directory.publish(entry, ttl_s)


def _renewed(
    directory: Directory, entry: Entry, ttl_s: float | None, stop: threading.Event
) -> Callable[[], object] | None:
    """Returns a function that publishes an entry repeatedly until `stop`; it keeps no agent alive."""
    if ttl_s is None:
        return None
    interval_s = ttl_s / _RENEWALS_IN_TTL

    def renew() -> None:
        said = ""
        while not stop.wait(interval_s):
            try:
                is_ours = directory.publish(entry, ttl_s, replace=False)
                words = "" if is_ours else "another agent has its name"
            except Exception as error:
                words = f"{type(error).__name__}: {error}"
            if words and words != said:
                logger().warning(
                    "kvxfer: %s could not renew its entry in its directory: %s", entry.name, words
                )
            said = words

    return renew


def _started(
    name: str, call: Callable[[], object], then: Callable[[], object] | None = None
) -> tuple[threading.Thread, Future[None]]:
    """Starts a thread that calls `call`, and `then` if that succeeds; the future gets the outcome."""
    from concurrent.futures import Future

    outcome: Future[None] = Future()

    def run() -> None:
        try:
            call()
        except BaseException as error:
            outcome.set_exception(error)
            return
        outcome.set_result(None)
        if then is not None:
            then()

    return start_thread(run, name), outcome


def _log_late(name: str, withdrawn: Future[None]) -> None:
    if (error := withdrawn.exception()) is not None:
        logger().warning("kvxfer: %s was not withdrawn from its directory: %r", name, error)
