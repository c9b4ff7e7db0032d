"""Sends notes to the workers of other engines and receives theirs, as messages between agents."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Final

import kvxfer
from kvxfer.connectors.common.notes import Note, read

_log = logging.getLogger("kvxfer")

# Unsent notes for one peer, beside those unread there: receipts are short; a long table has a dozen parts.
_MAX_WAITING: Final = 1024


class Mail:
    """Sends and receives the notes of one worker.

    A worker whose engine does not step reads no notes, and its agent has room for a bounded number. Further
    notes wait here, in their order, until `flush` finds room again or the peer is gone.

    Parameters
    ----------
    agent
        Of this worker.
    """

    def __init__(self, agent: kvxfer.Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()  # dialling threads also send notes, once their session is open
        self._waiting: dict[kvxfer.Peer, deque[bytes]] = {}

    def send(self, peer: kvxfer.Peer, note: Note) -> None:
        """Sends a note. Does nothing if the peer is gone, because each side has a deadline of its own."""
        with self._lock:
            waiting = self._waiting.setdefault(peer, deque())
            if len(waiting) < _MAX_WAITING:
                waiting.append(note.encode())
                if len(waiting) == _MAX_WAITING:
                    _log.warning(
                        "kvxfer: %s does not read its notes: further ones are dropped until it does",
                        peer.name,
                    )
            self._send_waiting(peer)

    def send_over(self, session: Future[kvxfer.Peer], note: Note) -> None:
        """Sends a note once a session is open: now, or from the dialling thread (the engine may not step)."""

        def send(session: Future[kvxfer.Peer]) -> None:
            if not session.cancelled() and session.exception() is None:
                self.send(session.result(), note)

        session.add_done_callback(send)

    def flush(self) -> None:
        """Sends the waiting notes, as far as the peers have room."""
        if not self._waiting:
            return
        with self._lock:
            for peer in list(self._waiting):
                self._send_waiting(peer)

    def receive(self, timeout_s: float = 0.0) -> Iterator[tuple[kvxfer.Peer, Note]]:
        """Yields the notes that have arrived; waits up to `timeout_s` if none have. Logs invalid notes."""
        message = self._take(0.0)
        if message is None and timeout_s:
            message = self._take(timeout_s)
        while message is not None:
            try:
                yield message.peer, read(message.payload)
            except ValueError as error:
                _log.warning("kvxfer: %s sent a note that cannot be read: %s", message.peer.name, error)
            message = self._take(0.0)

    def _take(self, timeout_s: float) -> kvxfer.Message | None:
        """Returns the next message; None if none came in time, or if one could not be taken."""
        try:
            return self._agent.message_blocking(timeout_s) if timeout_s else self._agent.take_message()
        except TimeoutError:
            return None
        except kvxfer.AgentError:
            raise  # the agent is closed: this engine can hand over nothing any more
        except Exception:
            # Input from another engine must not end this engine.
            _log.exception("kvxfer: %s: a message could not be taken", self._agent.name)
            return None

    def _send_waiting(self, peer: kvxfer.Peer) -> None:
        waiting = self._waiting[peer]
        try:
            while waiting:
                peer.send(waiting[0])
                waiting.popleft()
        except kvxfer.ExhaustedError:
            return
        except kvxfer.KvxferError as error:
            _log.debug("kvxfer: %d notes were not sent to %s: %s", len(waiting), peer.name, error)
        del self._waiting[peer]
