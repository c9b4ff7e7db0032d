"""An agent's drain request, and the callbacks for its changes."""

from __future__ import annotations

from collections.abc import Callable

from kvxfer.log import logger

#: Called with the new value of `Agent.draining`.
OnDraining = Callable[[float | None], object]


class Drain:
    """Holds the value of `Agent.draining`, and the callbacks for its changes."""

    def __init__(self) -> None:
        self.until: float | None = None
        self._callbacks: tuple[OnDraining, ...] = ()

    def call(self, callback: OnDraining) -> None:
        """Registers `callback` for each change; if it raises, that is logged."""
        self._callbacks = (*self._callbacks, callback)

    def ask(self, until: float | None) -> None:
        """Requests a drain by a time of `time.monotonic`; None withdraws the request."""
        self.until = until
        for callback in self._callbacks:
            try:
                callback(until)
            except Exception as error:
                logger().warning("kvxfer: a callback of on_draining raised %r", error)
