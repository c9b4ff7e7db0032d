"""Pages that may give way, in the order in which they do: the least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from kvxfer.control.host_pool.page import Page

Order = OrderedDict[Page, None]


class IdlePages:
    """The same pages in two orders: a layout's make room for its own, a tenant's keep its quota."""

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
        """Takes in a page that may give way now, as the most recently used."""
        for orders, name in self._orders(page):
            orders.setdefault(name, OrderedDict())[page] = None

    def remove(self, page: Page) -> None:
        """Takes out a page that may not give way any more, or does."""
        for orders, name in self._orders(page):
            del orders[name][page]
            if not orders[name]:
                del orders[name]

    def _orders(self, page: Page) -> tuple[tuple[dict[str, Order], str], ...]:
        return (self._of_layout, page.key.layout), (self._of_tenant, page.key.tenant)
