"""Whether an agent was asked to drain, and who wants to hear of it."""

from __future__ import annotations

from collections.abc import Callable

from kvxfer.log import logger

#: Called with `Agent.draining` as it has become.
OnDraining = Callable[[float | None], object]


class Drain:
    """What `Agent.draining` is, and who is told when it changes."""

    def __init__(self) -> None:
        self.until: float | None = None
        self._callbacks: tuple[OnDraining, ...] = ()

    def call(self, callback: OnDraining) -> None:
        """Has `callback` called at each change; of one that raises the log tells."""
        self._callbacks = (*self._callbacks, callback)

    def ask(self, until: float | None) -> None:
        """Asks to drain until a time of `time.monotonic`, or takes that back by None."""
        self.until = until
        for callback in self._callbacks:
            try:
                callback(until)
            except Exception as error:
                logger().warning("kvxfer: a callback of on_draining raised %r", error)
