"""A descriptor that other threads make readable."""

from __future__ import annotations

import os
import threading


class Bell:
    """Wakes the thread that polls its descriptor. A late ring never touches another descriptor.

    The descriptor is negative if the process has none left; sleepers then check periodically.
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
        """Makes the descriptor unreadable until the next ring; called by the thread that polls it."""
        if self.fd >= 0:
            try:
                os.eventfd_read(self.fd)
            except BlockingIOError:
                pass

    def close(self) -> None:
        """Closes the descriptor. Idempotent."""
        with self._lock:
            if not self._closed and self.fd >= 0:
                os.close(self.fd)
            self._closed = True

    def forked(self) -> None:
        """Closes it in the child of a fork, without the lock, which a thread of the parent may hold."""
        self._lock = threading.Lock()
        self.close()
