"""Waiting for a condition that another thread, process or machine makes true."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

# Only a hang reaches it.
BOUND_S = 60.0
T = TypeVar("T")


def until(
    met: Callable[[], T | None],
    what: object = "the condition",
    *,
    timeout_s: float = BOUND_S,
    pause_s: float = 0.002,
) -> T:
    """Repeats a question until the answer is true, and returns it.

    `what` names the condition in the failure's message; a function is called, only then, for more words.
    """
    end_s = time.monotonic() + timeout_s
    while not (found := met()):
        assert time.monotonic() < end_s, _failure(what, timeout_s)
        time.sleep(pause_s)
    return found


async def until_on_loop(
    met: Callable[[], T | None],
    what: object = "the condition",
    *,
    timeout_s: float = BOUND_S,
    pause_s: float = 0.002,
) -> T:
    """Does the same while the running loop goes on."""
    end_s = time.monotonic() + timeout_s
    while not (found := met()):
        assert time.monotonic() < end_s, _failure(what, timeout_s)
        await asyncio.sleep(pause_s)
    return found


def _failure(what: object, timeout_s: float) -> str:
    return f"waited {timeout_s:g} s in vain: {what() if callable(what) else what}"
