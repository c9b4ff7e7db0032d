"""Pages that may be evicted, in the order of eviction: the least recently used page first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from kvxfer.control.host_pool.page import Page

Order = OrderedDict[Page, None]


class IdlePages:
    """Keeps the pages in two orders: by layout, to make room for that layout; by tenant, for its quota."""

    def __init__(self) -> None:
        self._of_layout: dict[str, Order] = {}
        self._of_tenant: dict[str, Order] = {}

    def of_layout(self, layout: str) -> Collection[Page]:
        """Returns those of a layout, the least recently used first."""
        return self._of_layout.get(layout, ())

    def of_tenant(self, tenant: str) -> Collection[Page]:
        """Returns those of a tenant, the least recently used first."""
        return self._of_tenant.get(tenant, ())

    def add(self, page: Page) -> None:
        """Adds a page that may be evicted from now on, as the most recently used one."""
        for orders, name in self._orders(page):
            orders.setdefault(name, OrderedDict())[page] = None

    def remove(self, page: Page) -> None:
        """Removes a page that is in use again, or is evicted."""
        for orders, name in self._orders(page):
            del orders[name][page]
            if not orders[name]:
                del orders[name]

    def _orders(self, page: Page) -> tuple[tuple[dict[str, Order], str], ...]:
        return (self._of_layout, page.key.layout), (self._of_tenant, page.key.tenant)
