"""Waiting for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

BOUND_S = 60.0
T = TypeVar("T")


def until(met: Callable[[], T | None], words: str) -> T:
    """Repeats a question until the answer is true, and returns it."""
    end_s = time.monotonic() + BOUND_S
    while not (found := met()):
        assert time.monotonic() < end_s, words
        time.sleep(0.02)
    return found
