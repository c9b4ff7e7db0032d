"""Threads that help an engine's own, without its signals."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from kvxfer.threads import signals_blocked

_T = TypeVar("_T")


class HelperThreads(ThreadPoolExecutor):
    """An executor whose threads take no signal that is sent to the process."""

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        """Starts a thread if none is idle."""
        with signals_blocked():
            return super().submit(fn, *args, **kwargs)
