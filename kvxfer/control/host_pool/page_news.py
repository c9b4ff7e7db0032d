"""Who is told of keys of pages: before they are acknowledged, and when they are gone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kvxfer.control.host_pool.page import PageKey
from kvxfer.log import logger

#: Says before pages are acknowledged that they are there. What it raises ends the parking.
OnParked = Callable[[list[PageKey]], Awaitable[None]]
#: Says that pages are gone, and why: ``"dropped"`` or ``"evicted"``. Must not block.
OnDropped = Callable[[list[PageKey], str], None]


class PageNews:
    """Tells the daemon, which keeps keys over a restart."""

    def __init__(self, on_parked: OnParked | None, on_dropped: OnDropped | None) -> None:
        self._on_parked = on_parked
        self._on_dropped = on_dropped

    async def parked(self, keys: list[PageKey]) -> None:
        """Says that pages are there, unless `dropped` follows."""
        if self._on_parked is not None:
            await self._on_parked(keys)

    def dropped(self, keys: list[PageKey], why: str) -> None:
        """Says that pages are gone; nothing that depends on it can fail."""
        if self._on_dropped is None or not keys:
            return
        try:
            self._on_dropped(keys, why)
        except Exception as error:
            logger().error("kvxfer: telling of %d %s pages: %r", len(keys), why, error)
