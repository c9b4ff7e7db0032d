"""A descriptor that other threads make readable."""

from __future__ import annotations

import os
import threading


class Bell:
    """Wakes whoever polls its descriptor; one that rings late touches no other descriptor.

    The descriptor is negative where none is left: who sleeps looks again by itself then.
    """

    def __init__(self) -> None:
        try:
            self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:
            self.fd = -1
        self._lock = threading.Lock()
        self._closed = False

    def ring(self) -> None:
        """Makes the descriptor readable. From any thread; does nothing once closed."""
        with self._lock:
            if not self._closed and self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def quiet(self) -> None:
        """Has it unreadable until it rings again; by the thread that polls it."""
        if self.fd >= 0:
            try:
                os.eventfd_read(self.fd)
            except BlockingIOError:
                pass

    def close(self) -> None:
        """Gives the descriptor back. Idempotent."""
        with self._lock:
            if not self._closed and self.fd >= 0:
                os.close(self.fd)
            self._closed = True

    def forked(self) -> None:
        """In the child of a fork, where a thread of the parent's may have the lock: closes it there."""
        self._lock = threading.Lock()
        self.close()
