"""How a run goes: how far it is, Ctrl-C that ends it in order, and what it comes to."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

from kvxfer.bench.errors import CheckFailedError
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.options import described


@dataclass(frozen=True, slots=True)
class Progress:
    """``done`` of ``total`` steps, and what happens now or has just happened."""

    done: int
    total: int
    words: str


Say = Callable[[Progress], None]


class Interrupt:
    """While it is entered, the first SIGINT asks and the second raises ``KeyboardInterrupt``.

    A run looks at `asked` between two of its steps: what was measured is kept. Outside the main thread,
    where signals do not arrive, nothing is changed.
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

    def __exit__(self, *exception: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def result_of(bench: str, options: Any, measure: Callable[[], Message], **known: Any) -> Message:
    """Returns the result of a run as one JSON object; ``verified`` is false when a check failed.

    It has the options, what is ``known`` beforehand, and what ``measure`` returns.
    """
    result = {"bench": bench, **described(options), **known}
    try:
        return {**result, **measure(), "verified": True}
    except CheckFailedError as error:
        return {**result, "verified": False, "failure": str(error)}
