"""Callbacks about keys of pages: before pages are acknowledged, and when pages are gone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kvxfer.control.host_pool.page import PageKey
from kvxfer.log import logger

#: Called before pages are acknowledged as parked. If it raises, the parking fails.
OnParked = Callable[[list[PageKey]], Awaitable[None]]
#: Called when pages are gone, with the reason: ``"dropped"`` or ``"evicted"``. Must not block.
OnDropped = Callable[[list[PageKey], str], None]


class PageNews:
    """Tells the daemon about keys, which it keeps over a restart."""

    def __init__(self, on_parked: OnParked | None, on_dropped: OnDropped | None) -> None:
        self._on_parked = on_parked
        self._on_dropped = on_dropped

    async def parked(self, keys: list[PageKey]) -> None:
        """Reports that pages are parked; `dropped` may follow for the same keys."""
        if self._on_parked is not None:
            await self._on_parked(keys)

    def dropped(self, keys: list[PageKey], why: str) -> None:
        """Reports that pages are gone; an error in the callback is only logged."""
        if self._on_dropped is None or not keys:
            return
        try:
            self._on_dropped(keys, why)
        except Exception as error:
            logger().error("kvxfer: the callback for %d %s pages failed: %r", len(keys), why, error)
