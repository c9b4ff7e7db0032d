"""Notes to workers of other engines and from them, as messages of their agents."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from typing import Final

import kvxfer
from kvxfer.connectors.common.notes import Note, read

_log = logging.getLogger("kvxfer")

# Of one peer, beside what waits unread at its end: receipts are short, and a long table has a dozen parts.
_MAX_WAITING: Final = 1024


class Mail:
    """The notes of one worker.

    A worker whose engine does not step reads nothing, and has room for so many notes. Those beyond wait here,
    in their order, until `flush` finds room again or the peer is gone.

    Parameters
    ----------
    agent
        Of this worker.
    """

    def __init__(self, agent: kvxfer.Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()  # threads that dial send what waited for the session
        self._waiting: dict[kvxfer.Peer, deque[bytes]] = {}

    def send(self, peer: kvxfer.Peer, note: Note) -> None:
        """Sends a note, or does nothing where the peer is gone: each side has a deadline of its own."""
        with self._lock:
            waiting = self._waiting.setdefault(peer, deque())
            if len(waiting) < _MAX_WAITING:
                waiting.append(note.encode())
                if len(waiting) == _MAX_WAITING:
                    _log.warning("kvxfer: %s reads no notes: it is told no more until it does", peer.name)
            self._send_waiting(peer)

    def flush(self) -> None:
        """Sends what has waited, as far as there is room."""
        if not self._waiting:
            return
        with self._lock:
            for peer in list(self._waiting):
                self._send_waiting(peer)

    def receive(self, timeout_s: float = 0.0) -> Iterator[tuple[kvxfer.Peer, Note]]:
        """Yields the notes that are there, and waits so long where there are none; logs what is no note."""
        message = self._agent.take_message()
        if message is None and timeout_s:
            try:
                message = self._agent.message_blocking(timeout_s)
            except TimeoutError:
                return
        while message is not None:
            try:
                yield message.peer, read(message.payload)
            except ValueError as error:
                _log.warning("kvxfer: %s sent a note that cannot be read: %s", message.peer.name, error)
            message = self._agent.take_message()

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
