"""Which pages are parked where: keys, places, pins, quotas and what goes first. No I/O and no clock."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from kvxfer.errors import ExhaustedError, invalid

#: Of each text of a key.
MAX_KEY_NBYTES = 512


class PageKey(NamedTuple):
    """By what a page is found. Another tenant, model, revision or layout is another page.

    Attributes
    ----------
    layout
        `page_layout.digest_of` what the page holds.
    key
        The caller's own name of it, e.g. a hash of the tokens up to its end.
    """

    tenant: str
    model: str
    revision: str
    layout: str
    key: str


class PageState(StrEnum):
    """Where a page stands. Members equal the words they show."""

    PARKING = "parking"  # it is being read, and nobody finds it yet
    PARKED = "parked"
    DROPPED = "dropped"  # nobody finds it any more, and somebody still reads it


@dataclass(slots=True, eq=False)
class Page:
    """A page that has a place. Read only outside of `PageIndex`.

    Attributes
    ----------
    key
        By what it is found.
    slab, block
        Its place.
    nbytes
        What it takes of the pool.
    serial
        Of its parking, ascending; never reused.
    num_holds
        Who reads it now: leases and transfers.
    parked_at, used_at
        As `now` was told.
    num_fetches
        How often it was held to be read.
    """

    key: PageKey
    slab: int
    block: int
    nbytes: int
    serial: int
    state: PageState = PageState.PARKING
    is_pinned: bool = False
    num_holds: int = 0
    parked_at: float = 0.0
    used_at: float = 0.0
    num_fetches: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether it may give way to others."""
        return self.state is PageState.PARKED and not self.is_pinned and not self.num_holds


class Reservation(NamedTuple):
    """What became of keys that are to be parked; each stands once in one of the first three.

    Attributes
    ----------
    pages
        Have places now, and are to be filled: end each by `PageIndex.commit` or `PageIndex.abort`.
    present
        Are parked.
    parking
        Are being parked by another call.
    evicted
        Had to give way.
    formatted
        Slabs that hold pages of this layout from now on, and had none or others before.
    """

    pages: list[Page]
    present: list[PageKey]
    parking: list[PageKey]
    evicted: list[PageKey]
    formatted: list[int]


@dataclass(slots=True)
class TenantUse:
    """What one tenant has in the pool.

    Attributes
    ----------
    nbytes, num_pages
        In all, pages that are being parked or are dropped and still read included.
    quota_nbytes
        The most; None for no bound.
    """

    nbytes: int = 0
    num_pages: int = 0
    quota_nbytes: int | None = None
    idle: OrderedDict[Page, None] = field(default_factory=OrderedDict)


class IndexStats(NamedTuple):
    """Figures of a `PageIndex`; counters are since its making."""

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


@dataclass(slots=True)
class _Slab:
    """A piece of the pool that holds pages of one layout."""

    number: int
    layout: str = ""
    num_blocks: int = 0
    num_pages: int = 0
    num_busy: int = 0  # of its pages, those that are not idle
    used_at: float = 0.0
    free: list[int] = field(default_factory=list)  # a heap: adjacent blocks make longer runs


class PageIndex:
    """Pages by key, the places that they take, and the order in which they give way.

    The pool is cut into slabs of equal size; a slab holds pages of one layout until it is empty, or all of
    its pages have given way. What is neither pinned nor held gives way, the least recently used first: to
    make room a page of the same layout, or all pages of a slab of another one where even the newest of those
    is older; to keep a tenant's quota its own.

    Not safe for several threads. ``now`` is any clock that does not go back.

    Parameters
    ----------
    num_slabs, slab_nbytes
        What there is.
    quota_nbytes, quotas
        The most that a tenant may have: of all that are not named, and of those that are. None for no bound.
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
        self.slab_nbytes = slab_nbytes
        self._slabs = [_Slab(number) for number in range(num_slabs)]
        self._unused = list(range(num_slabs))
        heapq.heapify(self._unused)
        self._of_layout: dict[str, dict[int, _Slab]] = {}
        self._with_room: dict[str, dict[int, _Slab]] = {}
        self._idle: dict[str, OrderedDict[Page, None]] = {}
        self._pages: dict[PageKey, Page] = {}
        self._by_serial: dict[int, Page] = {}
        self._serials: list[int] = []  # ascending; those that are gone stay until half of them are
        self._last_serial = 0
        self._tenants: dict[str, TenantUse] = {}
        self._quota_nbytes = quota_nbytes
        self._quotas = dict(quotas or {})
        self._max_pinned_nbytes = (
            num_slabs * slab_nbytes // 2 if max_pinned_nbytes is None else max_pinned_nbytes
        )
        self._pinned_nbytes = 0
        self._used_nbytes = 0
        self._num_held = 0
        self._counts = {"parked": 0, "hits": 0, "misses": 0, "evicted": 0, "dropped": 0}

    # ---- parking ----------------------------------------------------------------------------

    def reserve(self, keys: Sequence[PageKey], page_nbytes: int, now: float) -> Reservation:
        """Gives places to those of `keys` that are not there; all, or none, which evicts nothing.

        Parameters
        ----------
        keys
            Distinct, of one tenant and one layout.
        page_nbytes
            What each takes; the same in all calls of the layout.

        Raises
        ------
        UsageError
            ``invalid-argument``: keys of several tenants or layouts, twice the same, or too long; a page that
            is larger than a slab.
        ExhaustedError
            The tenant's quota, or the pool, has no room even if all that may does give way.
        """
        self._check_keys(keys, page_nbytes)
        new: list[PageKey] = []
        present: list[PageKey] = []
        parking: list[PageKey] = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                new.append(key)
            else:
                (parking if page.state is PageState.PARKING else present).append(key)
        if not new:
            for key in present:
                self._use(self._pages[key], now)
            return Reservation([], present, parking, [], [])
        # What is there must not give way to what is not.
        kept = [self._pages[key] for key in present]
        for page in kept:
            self._hold(page)
        try:
            pages, evicted, formatted = self._place(new, page_nbytes, now)
        finally:
            for page in kept:
                self._let_go(page, now)
        return Reservation(pages, present, parking, evicted, formatted)

    def commit(self, pages: Iterable[Page], now: float) -> None:
        """Makes pages that were filled visible."""
        for page in pages:
            if page.state is PageState.PARKING:
                page.state = PageState.PARKED
                page.parked_at = page.used_at = now
                self._counts["parked"] += 1
                self._busy_or_idle(page, was_idle=False)

    def abort(self, pages: Iterable[Page]) -> None:
        """Gives back the places of pages that were not filled. Nothing may land in them any more."""
        for page in pages:
            if page.state is PageState.PARKING:
                self._forget(page)
                self._free(page)

    # ---- reading ----------------------------------------------------------------------------

    def find(self, key: PageKey) -> Page | None:
        """Returns a page that is parked; no use of it."""
        page = self._pages.get(key)
        return None if page is None or page.state is not PageState.PARKED else page

    def hold(self, keys: Iterable[PageKey], now: float) -> tuple[list[Page], list[PageKey]]:
        """Keeps pages from giving way until `release`; returns them, and the keys that are not there."""
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

    def release(self, pages: Iterable[Page], now: float) -> None:
        """Ends a hold of each; pages that were dropped give back their places with the last."""
        for page in pages:
            self._let_go(page, now)

    # ---- steering ---------------------------------------------------------------------------

    def pin(self, keys: Iterable[PageKey], pinned: bool = True) -> list[PageKey]:
        """Has pages that are parked give way never, or again; returns those that are there.

        Raises
        ------
        ExhaustedError
            More would be pinned than may be. None of them is then.
        """
        pages = [page for key in dict.fromkeys(keys) if (page := self.find(key)) is not None]
        change = sum(page.nbytes for page in pages if page.is_pinned is not pinned)
        if pinned and self._pinned_nbytes + change > self._max_pinned_nbytes:
            raise ExhaustedError(
                f"{self._pinned_nbytes} bytes of the pool are pinned, and {change} more would be over the "
                f"{self._max_pinned_nbytes} that may be: unpin others, or make the pool larger",
                code="exhausted",
            )
        for page in pages:
            self._set_pinned(page, pinned)
        return [page.key for page in pages]

    def drop(self, keys: Iterable[PageKey]) -> list[Page]:
        """Takes pages away, pinned or not, and returns those that were there: nobody finds them any more.

        Those in state `PageState.DROPPED` are held yet, and give back their places with the last `release`.
        """
        found = [page for key in dict.fromkeys(keys) if (page := self.find(key)) is not None]
        for page in found:
            self._set_pinned(page, False)
            self._forget(page)
            self._counts["dropped"] += 1
            if page.num_holds:
                page.state = PageState.DROPPED
            else:
                self._take_idle(page)
                self._free(page)
        return found

    def set_quota(self, tenant: str, nbytes: int | None) -> None:
        """Changes the most that a tenant may have, from the next parking on; evicts nothing."""
        self._quotas[tenant] = nbytes
        if (use := self._tenants.get(tenant)) is not None:
            use.quota_nbytes = nbytes

    def unformat(self, slab: int) -> None:
        """Has a slab without pages hold those of no layout; does nothing to one that has some."""
        if not self._slabs[slab].num_pages:
            self._unformat(self._slabs[slab])

    # ---- telling ----------------------------------------------------------------------------

    def pages(self, tenant: str | None = None, after: int = 0, most: int = 1000) -> list[Page]:
        """Returns pages that are parked, in the order of their parking.

        Parameters
        ----------
        tenant
            Whose; None for all.
        after
            The serial of the last one that the caller has.
        most
            How many.
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

    def tenants(self) -> Mapping[str, TenantUse]:
        """Returns what each tenant has; read only."""
        return self._tenants

    def stats(self) -> IndexStats:
        """Returns figures of now."""
        return IndexStats(
            num_slabs=len(self._slabs),
            num_slabs_used=len(self._slabs) - len(self._unused),
            nbytes=len(self._slabs) * self.slab_nbytes,
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

    def _check_keys(self, keys: Sequence[PageKey], page_nbytes: int) -> None:
        if len({key[:4] for key in keys}) > 1:
            raise invalid("pages that are parked together are of one tenant, model, revision and layout")
        if len(set(keys)) != len(keys):
            raise invalid("a key is named twice among pages that are to be parked")
        for key in keys:
            if not key.key or any(len(part.encode(errors="surrogatepass")) > MAX_KEY_NBYTES for part in key):
                raise invalid(
                    f"a page's key has 1 to {MAX_KEY_NBYTES} bytes, as its tenant, model and revision"
                )
        if page_nbytes > self.slab_nbytes:
            raise invalid(
                f"a page of this layout takes {page_nbytes} bytes, and a slab of the pool has "
                f"{self.slab_nbytes}: make slabs larger"
            )

    def _place(
        self, keys: list[PageKey], page_nbytes: int, now: float
    ) -> tuple[list[Page], list[PageKey], list[int]]:
        tenant, layout = keys[0].tenant, keys[0].layout
        over_nbytes = self._require_quota(tenant, len(keys) * page_nbytes)
        self._require_room(layout, page_nbytes, len(keys))
        evicted: list[PageKey] = []
        formatted: list[int] = []
        while over_nbytes > 0:
            page = next(iter(self._tenants[tenant].idle))
            over_nbytes -= page.nbytes
            evicted.append(self._evict(page))
        pages = []
        for key in keys:
            slab = self._slab_with_room(layout, page_nbytes, evicted, formatted)
            block = heapq.heappop(slab.free)
            if not slab.free:
                del self._with_room[layout][slab.number]
            self._last_serial += 1
            page = Page(key, slab.number, block, page_nbytes, self._last_serial)
            slab.num_pages += 1
            slab.num_busy += 1
            slab.used_at = now
            self._pages[key] = self._by_serial[page.serial] = page
            self._serials.append(page.serial)
            self._used_nbytes += page_nbytes
            use = self._use_of(tenant)  # what gave way may have been all that it had
            use.nbytes += page_nbytes
            use.num_pages += 1
            pages.append(page)
        return pages, evicted, formatted

    def _require_quota(self, tenant: str, nbytes: int) -> int:
        """Returns how many bytes of the tenant's own have to give way for `nbytes` more."""
        use = self._tenants.get(tenant)
        quota = self._quotas.get(tenant, self._quota_nbytes)
        if quota is None:
            return 0
        over_nbytes = (use.nbytes if use else 0) + nbytes - quota
        short_nbytes = over_nbytes
        for page in use.idle if use else ():
            if short_nbytes <= 0:
                break
            short_nbytes -= page.nbytes
        if short_nbytes > 0:
            raise ExhaustedError(
                f"{nbytes} bytes more are over the quota of tenant {tenant!r} ({quota} bytes, of which it "
                f"has {use.nbytes if use else 0}), and what it has is pinned, or being read, or not enough: "
                "unpin or drop some, or raise the quota",
                code="exhausted",
            )
        return over_nbytes

    def _require_room(self, layout: str, page_nbytes: int, num_pages: int) -> None:
        of_slab = self.slab_nbytes // page_nbytes
        room = len(self._unused) * of_slab + len(self._idle.get(layout, ()))
        for slab in self._slabs:
            if slab.layout == layout:
                room += len(slab.free)
            elif slab.layout and not slab.num_busy:
                room += of_slab
            if room >= num_pages:
                return
        if room >= num_pages:
            return
        raise ExhaustedError(
            f"{num_pages} pages of {page_nbytes} bytes do not fit in the pool, which can give room to {room}"
            ": all else is pinned or being read",
            code="exhausted",
        )

    def _slab_with_room(
        self, layout: str, page_nbytes: int, evicted: list[PageKey], formatted: list[int]
    ) -> _Slab:
        while True:
            if slabs := self._with_room.get(layout):
                return next(iter(slabs.values()))
            if self._unused:
                slab = self._slabs[heapq.heappop(self._unused)]
                self._format(slab, layout, page_nbytes)
                formatted.append(slab.number)
                continue
            oldest = next(iter(self._idle.get(layout, ())), None)
            others = (slab for slab in self._slabs if slab.layout != layout and not slab.num_busy)
            other = min(others, key=lambda slab: slab.used_at if slab.num_pages else -1.0, default=None)
            if other is not None and (
                oldest is None or not other.num_pages or other.used_at < oldest.used_at
            ):
                idle = self._idle.get(other.layout, ())
                for page in [page for page in idle if page.slab == other.number]:
                    evicted.append(self._evict(page))
                self._unformat(other)
            else:
                assert oldest is not None, "_require_room has counted"
                evicted.append(self._evict(oldest))

    def _format(self, slab: _Slab, layout: str, page_nbytes: int) -> None:
        slab.layout = layout
        slab.num_blocks = self.slab_nbytes // page_nbytes
        slab.free = list(range(slab.num_blocks))
        self._of_layout.setdefault(layout, {})[slab.number] = slab
        self._with_room.setdefault(layout, {})[slab.number] = slab

    def _unformat(self, slab: _Slab) -> None:
        if not slab.layout:
            return
        for slabs in (self._of_layout, self._with_room):
            slabs.get(slab.layout, {}).pop(slab.number, None)
            if not slabs.get(slab.layout, True):
                del slabs[slab.layout]
        slab.layout, slab.free = "", []
        heapq.heappush(self._unused, slab.number)

    # ---- inside -----------------------------------------------------------------------------

    def _use_of(self, tenant: str) -> TenantUse:
        use = self._tenants.get(tenant)
        if use is None:
            use = TenantUse(quota_nbytes=self._quotas.get(tenant, self._quota_nbytes))
            self._tenants[tenant] = use
        return use

    def _use(self, page: Page, now: float) -> None:
        page.used_at = self._slabs[page.slab].used_at = now
        if page.is_idle:
            self._idle[page.key.layout].move_to_end(page)
            self._tenants[page.key.tenant].idle.move_to_end(page)

    def _hold(self, page: Page) -> None:
        was_idle = page.is_idle
        page.num_holds += 1
        self._num_held += page.num_holds == 1
        self._busy_or_idle(page, was_idle)

    def _let_go(self, page: Page, now: float) -> None:
        page.num_holds -= 1
        self._num_held -= not page.num_holds
        if page.state is PageState.DROPPED:
            if not page.num_holds:
                self._free(page)
            return
        page.used_at = self._slabs[page.slab].used_at = max(now, page.used_at)
        self._busy_or_idle(page, was_idle=False)

    def _set_pinned(self, page: Page, pinned: bool) -> None:
        if page.is_pinned is pinned:
            return
        was_idle = page.is_idle
        page.is_pinned = pinned
        self._pinned_nbytes += page.nbytes if pinned else -page.nbytes
        self._busy_or_idle(page, was_idle)

    def _busy_or_idle(self, page: Page, was_idle: bool) -> None:
        """Takes in whether a page may give way; one that may again is the most recently used."""
        if page.is_idle is was_idle:
            return
        if was_idle:
            self._take_idle(page)
            self._slabs[page.slab].num_busy += 1
        else:
            self._idle.setdefault(page.key.layout, OrderedDict())[page] = None
            self._tenants[page.key.tenant].idle[page] = None
            self._slabs[page.slab].num_busy -= 1

    def _take_idle(self, page: Page) -> None:
        """Takes a page out of the orders in which pages give way."""
        idle = self._idle[page.key.layout]
        del idle[page]
        if not idle:
            del self._idle[page.key.layout]
        del self._tenants[page.key.tenant].idle[page]

    def _evict(self, page: Page) -> PageKey:
        self._take_idle(page)
        self._forget(page)
        self._free(page)
        self._counts["evicted"] += 1
        return page.key

    def _forget(self, page: Page) -> None:
        """Nobody finds it any more."""
        if self._pages.get(page.key) is page:
            del self._pages[page.key]
        self._by_serial.pop(page.serial, None)
        if len(self._serials) > 64 and len(self._serials) > 2 * len(self._by_serial):
            self._serials = [serial for serial in self._serials if serial in self._by_serial]

    def _free(self, page: Page) -> None:
        """Gives back its place."""
        slab = self._slabs[page.slab]
        heapq.heappush(slab.free, page.block)
        self._with_room.setdefault(slab.layout, {})[slab.number] = slab
        slab.num_pages -= 1
        if not page.is_idle:
            slab.num_busy -= 1
        self._used_nbytes -= page.nbytes
        use = self._tenants[page.key.tenant]
        use.nbytes -= page.nbytes
        use.num_pages -= 1
        if not use.num_pages:
            del self._tenants[page.key.tenant]


def document_of(page: Page) -> dict[str, Any]:
    """Returns what is told of a page, as a JSON object."""
    return {
        **page.key._asdict(),
        "nbytes": page.nbytes,
        "state": str(page.state),
        "pinned": page.is_pinned,
        "holds": page.num_holds,
        "fetches": page.num_fetches,
        "serial": page.serial,
        "parked_at": page.parked_at,
        "used_at": page.used_at,
    }
