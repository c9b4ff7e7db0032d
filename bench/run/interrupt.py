"""Ctrl-C that ends a run in order: what was measured is kept."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class Interrupt:
    """While it is entered, the first SIGINT asks and the second raises ``KeyboardInterrupt``.

    A run looks at `asked` between two of its steps. Outside the main thread, where signals do not
    arrive, nothing is changed.
    """

    def __init__(self) -> None:
        self.asked = False

    def stops(self, num_measured: int) -> bool:
        """Whether the run is to end here, with what it has; raises when that is nothing."""
        if self.asked and num_measured == 0:
            raise KeyboardInterrupt
        return self.asked

    def __enter__(self) -> Self:
        self._before = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
