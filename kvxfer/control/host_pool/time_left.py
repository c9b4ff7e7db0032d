"""What is left of a call's time, which all of its waits and its transfer share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from kvxfer.arguments import seconds
from kvxfer.errors import TransferError

T = TypeVar("T")


class TimeLeft:
    """Begins with the call; belongs to its event loop.

    Raises
    ------
    UsageError
        ``invalid-argument``: the time is no number of seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = seconds(timeout_s, "timeout_s")
        self._until_s = asyncio.get_running_loop().time() + self._timeout_s

    @property
    def left_s(self) -> float:
        """The seconds that are left; a millisecond when the time is over, so that a transfer says so."""
        return max(self._until_s - asyncio.get_running_loop().time(), 0.001)

    async def wait(self, work: Awaitable[T], what: str) -> T:
        """Returns the result of work that no deadline of its own ends.

        Raises
        ------
        TransferError
            ``deadline``: the time is over; the work was cancelled.
        """
        scope = asyncio.timeout_at(self._until_s)
        try:
            async with scope:
                return await work
        except TimeoutError:
            if not scope.expired():
                raise  # the work's own
            words = f"the call's {self._timeout_s:g} s were over before {what}"
            raise TransferError(words, code="deadline") from None
