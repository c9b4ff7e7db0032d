"""Which pages are parked in which place, and which of them are evicted for others. No I/O and no clock."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvxfer.control.host_pool.idle_pages import IdlePages
from kvxfer.control.host_pool.page import Page, PageKey, PageState, check_keys
from kvxfer.control.host_pool.slabs import Slab, Slabs
from kvxfer.control.host_pool.tenants import Tenants
from kvxfer.errors import ExhaustedError, invalid


class Reservation(NamedTuple):
    """The result of reserving keys; each key is in exactly one of the first three lists.

    Attributes
    ----------
    pages
        Have places now, and have to be filled. End each by `PageIndex.commit` or `PageIndex.abort`.
    present
        Were parked already.
    parking
        Are being parked by another call.
    evicted
        Were evicted to make room.
    promised_nbytes
        What may be pinned later, whatever others pin meanwhile; end it by `PageIndex.pin`.
    """

    pages: list[Page]
    present: list[PageKey]
    parking: list[PageKey]
    evicted: list[PageKey]
    promised_nbytes: int = 0


class IndexStats(NamedTuple):
    """Figures of a `PageIndex`; its counters start when it is made."""

    num_slabs: int
    num_slabs_used: int
    nbytes: int
    used_nbytes: int
    num_pages: int
    pinned_nbytes: int
    num_held: int
    num_parked: int
    num_hits: int
    num_misses: int
    num_evicted: int
    num_dropped: int


class PageIndex:
    """Pages by key, the places that they take, and the order in which they are evicted.

    The pool is cut into slabs of equal size. A slab holds pages of one layout until it is empty, or until all
    of its pages are evicted. Pages that are neither pinned nor held may be evicted, the least recently used
    first. To make room, the index evicts a page of the same layout; or all pages of a slab of another layout,
    if even the newest of them is older. To keep a tenant's quota it evicts that tenant's own pages.

    Not safe for several threads. ``now`` is any clock that does not go back.

    Parameters
    ----------
    num_slabs, slab_nbytes
        The size of the pool.
    quota_nbytes, quotas
        The most that a tenant may have: each tenant that `quotas` does not name, and each that it names.
        None for no bound.
    max_pinned_nbytes
        The most that may be pinned; None for half of the pool.
    """

    def __init__(
        self,
        num_slabs: int,
        slab_nbytes: int,
        *,
        quota_nbytes: int | None = None,
        quotas: Mapping[str, int | None] | None = None,
        max_pinned_nbytes: int | None = None,
    ) -> None:
        self._slabs = Slabs(num_slabs, slab_nbytes)
        self._idle = IdlePages()
        self._tenants = Tenants(quota_nbytes, quotas or {})
        self._pages: dict[PageKey, Page] = {}
        self._by_serial: dict[int, Page] = {}
        self._serials: list[int] = []  # ascending; serials of gone pages stay until they are half of the list
        self._last_serial = 0
        self._max_pinned_nbytes = (
            num_slabs * slab_nbytes // 2 if max_pinned_nbytes is None else max_pinned_nbytes
        )
        self._pinned_nbytes = 0
        self._promised_nbytes = 0  # to be pinned by calls that are under way
        self._used_nbytes = 0
        self._num_held = 0
        self._counts = {"parked": 0, "hits": 0, "misses": 0, "evicted": 0, "dropped": 0}

    # ---- parking ----------------------------------------------------------------------------

    def reserve(
        self, keys: Sequence[PageKey], page_nbytes: int, now: float, *, pinned: bool = False
    ) -> Reservation:
        """Gives places to those of `keys` that are not parked: to all of them, or to none and evicts nothing.

        Parameters
        ----------
        keys
            Distinct, of one tenant and one layout.
        page_nbytes
            The bytes that each page takes; the same in all calls for one layout.
        pinned
            Whether the new pages are pinned, and room is promised for pinning those that are present.

        Raises
        ------
        UsageError
            ``invalid-argument``: keys of several tenants or layouts, a key twice, or a key that is too long;
            a page that is larger than a slab.
        ExhaustedError
            The tenant's quota, or the pool, has no room even if everything evictable is evicted; or more
            pages would be pinned than the limit permits.
        """
        check_keys(keys)
        if page_nbytes > self.slab_nbytes:
            raise invalid(
                f"a page of this layout takes {page_nbytes} bytes, but a slab of the pool has "
                f"{self.slab_nbytes}: make slabs larger"
            )
        new: list[PageKey] = []
        present: list[PageKey] = []
        parking: list[PageKey] = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                new.append(key)
            else:
                (parking if page.state is PageState.PARKING else present).append(key)
        unpinned_nbytes = sum(
            page_nbytes for key in (*present, *parking) if pinned and not self._pages[key].is_pinned
        )
        if pinned:
            self._require_pinnable(unpinned_nbytes + len(new) * page_nbytes)
        # Pages that are there count as used now, and must not be evicted for those that are not.
        kept = self.keep(present)
        try:
            pages, evicted = self._place(new, page_nbytes, now, pinned) if new else ([], [])
        finally:
            self.release(kept, now)
        promised_nbytes = sum(page.nbytes for page in kept if pinned and not page.is_pinned)
        self._promised_nbytes += promised_nbytes
        return Reservation(pages, present, parking, evicted, promised_nbytes)

    def commit(self, pages: Iterable[Page], now: float, *, is_new: bool = True) -> None:
        """Makes pages visible after they were filled; `is_new`: they count as parked."""
        for page in pages:
            if page.state is PageState.PARKING:
                page.state = PageState.PARKED
                page.parked_at = page.used_at = now
                self._counts["parked"] += is_new
                self._busy_or_idle(page, was_idle=False)

    def abort(self, pages: Iterable[Page]) -> None:
        """Gives back the places of pages that were not filled. Call it only when nothing can land in them."""
        for page in pages:
            if page.state is PageState.PARKING:
                self._set_pinned(page, False)
                self._forget(page)
                self._free(page)

    # ---- reading ----------------------------------------------------------------------------

    def find(self, key: PageKey) -> Page | None:
        """Returns a page that is parked; this does not count as a use."""
        page = self._pages.get(key)
        return None if page is None or page.state is not PageState.PARKED else page

    def hold(self, keys: Iterable[PageKey], now: float) -> tuple[list[Page], list[PageKey]]:
        """Protects pages from eviction until `release`; returns them, and the keys that are not parked."""
        held, missing = [], []
        for key in keys:
            if (page := self.find(key)) is None:
                missing.append(key)
                continue
            self._hold(page)
            page.used_at = self._slabs[page.slab].used_at = now
            page.num_fetches += 1
            held.append(page)
        self._counts["hits"] += len(held)
        self._counts["misses"] += len(missing)
        return held, missing

    def keep(self, keys: Iterable[PageKey]) -> list[Page]:
        """Protects those of `keys` that are parked from eviction until `release`; no reader fetches them."""
        kept = [page for key in keys if (page := self.find(key)) is not None]
        for page in kept:
            self._hold(page)
        return kept

    def release(self, pages: Iterable[Page], now: float) -> None:
        """Ends one hold of each page; a dropped page gives back its place with its last hold."""
        for page in pages:
            page.num_holds -= 1
            self._num_held -= not page.num_holds
            if page.state is not PageState.DROPPED:
                page.used_at = self._slabs[page.slab].used_at = max(now, page.used_at)
                self._busy_or_idle(page, was_idle=False)
            elif not page.num_holds:
                self._free(page)

    # ---- steering ---------------------------------------------------------------------------

    def pin(self, keys: Iterable[PageKey], pinned: bool = True, *, promised_nbytes: int = 0) -> list[PageKey]:
        """Pins parked pages, which protects them from eviction, or unpins them; returns those that are there.

        Parameters
        ----------
        promised_nbytes
            Of reservations of these keys, which end here.

        Raises
        ------
        ExhaustedError
            More pages would be pinned than the limit permits. Then none of them is pinned.
        """
        self._promised_nbytes -= promised_nbytes
        pages = [page for key in dict.fromkeys(keys) if (page := self.find(key)) is not None]
        if pinned:
            self._require_pinnable(sum(page.nbytes for page in pages if not page.is_pinned))
        for page in pages:
            self._set_pinned(page, pinned)
        return [page.key for page in pages]

    def drop(self, keys: Iterable[PageKey]) -> list[Page]:
        """Removes pages, pinned or not, so that they are no longer found; returns those that were there.

        Pages that it returns in state `PageState.DROPPED` are still held, and give back their places with
        their last `release`.
        """
        found = [page for key in dict.fromkeys(keys) if (page := self.find(key)) is not None]
        for page in found:
            self._set_pinned(page, False)
            self._forget(page)
            self._counts["dropped"] += 1
            if page.num_holds:
                page.state = PageState.DROPPED
            else:
                self._idle.remove(page)
                self._free(page)
        return found

    def bound_of(self, tenant: str) -> int | None:
        """Returns the most that a tenant may have, or None for no bound."""
        return self._tenants.quota_nbytes(tenant)

    def set_quota(self, tenant: str, nbytes: int | None) -> None:
        """Changes the most that a tenant may have, from the next parking on; evicts nothing."""
        self._tenants.set_quota(tenant, nbytes)

    # ---- telling ----------------------------------------------------------------------------

    @property
    def slab_nbytes(self) -> int:
        """Bytes of each slab."""
        return self._slabs.nbytes

    @property
    def layouts(self) -> Mapping[str, int]:
        """How many slabs each layout has, including layouts without pages; read only."""
        return self._slabs.layouts

    def pages(self, tenant: str | None = None, after: int = 0, most: int = 1000) -> list[Page]:
        """Returns pages that are parked, in the order of their parking.

        Parameters
        ----------
        tenant
            The tenant of the pages; None for all tenants.
        after
            The serial of the last page that the caller has.
        most
            How many to return at most.
        """
        found: list[Page] = []
        for at in range(bisect_right(self._serials, after), len(self._serials)):
            page = self._by_serial.get(self._serials[at])
            if page is None or page.state is not PageState.PARKED:
                continue
            if tenant is None or page.key.tenant == tenant:
                found.append(page)
                if len(found) >= most:
                    break
        return found

    def tenants_nbytes(self) -> Mapping[str, int]:
        """Returns the bytes of each tenant, including pages that are being parked; read only."""
        return self._tenants.used_nbytes

    def stats(self) -> IndexStats:
        """Returns the current figures."""
        return IndexStats(
            num_slabs=len(self._slabs),
            num_slabs_used=sum(self._slabs.layouts.values()),
            nbytes=len(self._slabs) * self._slabs.nbytes,
            used_nbytes=self._used_nbytes,
            num_pages=len(self._pages),
            pinned_nbytes=self._pinned_nbytes,
            num_held=self._num_held,
            num_parked=self._counts["parked"],
            num_hits=self._counts["hits"],
            num_misses=self._counts["misses"],
            num_evicted=self._counts["evicted"],
            num_dropped=self._counts["dropped"],
        )

    # ---- room -------------------------------------------------------------------------------

    def _require_pinnable(self, nbytes: int) -> None:
        """Refuses to pin more than the limit permits."""
        pinned_nbytes = self._pinned_nbytes + self._promised_nbytes
        if nbytes and pinned_nbytes + nbytes > self._max_pinned_nbytes:
            raise ExhaustedError(
                f"{pinned_nbytes} bytes of the pool are pinned, and {nbytes} more would exceed "
                f"the limit of {self._max_pinned_nbytes}: unpin others, or make the pool larger",
                code="exhausted",
            )

    def _place(
        self, keys: list[PageKey], page_nbytes: int, now: float, pinned: bool
    ) -> tuple[list[Page], list[PageKey]]:
        """Gives each key a place, after checking that all keys get one."""
        tenant, layout = keys[0].tenant, keys[0].layout
        over_nbytes = self._tenants.over_nbytes(tenant, len(keys) * page_nbytes, self._idle.of_tenant(tenant))
        room = self._slabs.room(layout, page_nbytes) + len(self._idle.of_layout(layout))
        if room < len(keys):
            raise ExhaustedError(
                f"{len(keys)} pages of {page_nbytes} bytes do not fit in the pool, which has room for "
                f"{room}: all others are pinned or being read",
                code="exhausted",
            )
        evicted: list[PageKey] = []
        while over_nbytes > 0:
            page = next(iter(self._idle.of_tenant(tenant)))
            over_nbytes -= page.nbytes
            evicted.append(self._evict(page))
        pages: list[Page] = []
        try:
            for key in keys:
                slab = self._slab_with_room(layout, page_nbytes, evicted)
                pages.append(self._placed(key, slab, page_nbytes, now))
        except BaseException:
            self.abort(pages)
            raise
        for page in pages:
            self._set_pinned(page, pinned)
        return pages, evicted

    def _placed(self, key: PageKey, slab: Slab, page_nbytes: int, now: float) -> Page:
        self._last_serial += 1
        page = Page(key, slab.number, self._slabs.take(slab, now), page_nbytes, self._last_serial)
        self._pages[key] = self._by_serial[page.serial] = page
        self._serials.append(page.serial)
        self._used_nbytes += page_nbytes
        self._tenants.add(key.tenant, page_nbytes)
        return page

    def _slab_with_room(self, layout: str, page_nbytes: int, evicted: list[PageKey]) -> Slab:
        """Returns a slab with a free block; evicts what it has to."""
        while (slab := self._slabs.with_room(layout, page_nbytes)) is None:
            oldest = next(iter(self._idle.of_layout(layout)), None)
            other = self._slabs.oldest_other(layout, page_nbytes)
            if other is not None and (
                oldest is None or not other.num_pages or other.used_at < oldest.used_at
            ):
                idle = self._idle.of_layout(other.layout)
                for page in [page for page in idle if page.slab == other.number]:
                    evicted.append(self._evict(page))
                self._slabs.format(other, layout, page_nbytes)
            else:
                assert oldest is not None, "_place has counted"
                evicted.append(self._evict(oldest))
        return slab

    # ---- inside -----------------------------------------------------------------------------

    def _hold(self, page: Page) -> None:
        was_idle = page.is_idle
        page.num_holds += 1
        self._num_held += page.num_holds == 1
        self._busy_or_idle(page, was_idle)

    def _set_pinned(self, page: Page, pinned: bool) -> None:
        if page.is_pinned is pinned:
            return
        was_idle = page.is_idle
        page.is_pinned = pinned
        self._pinned_nbytes += page.nbytes if pinned else -page.nbytes
        self._busy_or_idle(page, was_idle)

    def _busy_or_idle(self, page: Page, was_idle: bool) -> None:
        """Records whether a page may be evicted; one that may again counts as the most recently used."""
        if page.is_idle is was_idle:
            return
        if was_idle:
            self._idle.remove(page)
            self._slabs[page.slab].num_busy += 1
        else:
            self._idle.add(page)
            self._slabs[page.slab].num_busy -= 1

    def _evict(self, page: Page) -> PageKey:
        self._idle.remove(page)
        self._forget(page)
        self._free(page)
        self._counts["evicted"] += 1
        return page.key

    def _forget(self, page: Page) -> None:
        """Removes the page from what can be found."""
        if self._pages.get(page.key) is page:
            del self._pages[page.key]
        self._by_serial.pop(page.serial, None)
        if len(self._serials) > 64 and len(self._serials) > 2 * len(self._by_serial):
            self._serials = [serial for serial in self._serials if serial in self._by_serial]

    def _free(self, page: Page) -> None:
        """Gives back its place."""
        self._slabs.give_back(page.slab, page.block, was_busy=not page.is_idle)
        self._used_nbytes -= page.nbytes
        self._tenants.add(page.key.tenant, -page.nbytes)
