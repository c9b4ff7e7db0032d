"""Pages kept in the daemon's memory for those who ask: parked, leased to readers, pushed, dropped."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from kvxfer.control.host_pool.filling import Filling
from kvxfer.control.host_pool.page import Page, PageKey, PageState, Salt
from kvxfer.control.host_pool.page_index import IndexStats, PageIndex
from kvxfer.control.host_pool.page_layout import layout_digest, page_nbytes
from kvxfer.control.host_pool.page_leases import PageLease, PageLeases
from kvxfer.control.host_pool.page_news import OnDropped, OnParked, PageNews
from kvxfer.control.host_pool.page_sources import Granter, PageSources
from kvxfer.control.host_pool.pool_jobs import PoolJobs
from kvxfer.control.host_pool.pool_regions import PoolRegions
from kvxfer.control.own_agent import OwnAgent, RemotePlace
from kvxfer.errors import UsageError, invalid
from kvxfer.lease_token import LeaseToken
from kvxfer.memory.pool import Pool
from kvxfer.transfer import Transfer

#: Pages that one call may name. Each takes up to 10 us of the event loop, where it evicts another
#: (2-core x86, 2026-11-25): so a call holds up others for 40 ms at most.
MOST_PAGES: Final = 4096
# Enough slabs for several models, each with pages in several.
_NUM_SLABS: Final = 64
_LEAST_SLAB_NBYTES: Final = 2 * 1024 * 1024


class Parked(NamedTuple):
    """What `PagePool.park` did.

    Attributes
    ----------
    new
        Were read, and are there now.
    present
        Were there before, or were parked by another call meanwhile: nothing was read.
    """

    new: list[PageKey]
    present: list[PageKey]


class PoolStats(NamedTuple):
    """Figures of a `PagePool`."""

    pages: IndexStats
    num_leases: int
    num_parking: int
    page_kind: str


class PagePool:
    """Host memory of the daemon's, in which pages of any layout are kept under keys.

    A page is one block of a cache, in all layers that its rank holds. Nothing is durable: the pool is empty
    after a restart. All methods belong to one event loop; memory is taken when the pool is made.

    Parameters
    ----------
    own
        The agent that reads and serves pages.
    nbytes
        Of the pool.
    slab_nbytes
        Of the pieces that hold pages of one layout each; None for a 64th of the pool, at least 2 MiB.
    quota_nbytes, quotas, max_pinned_nbytes
        As in `PageIndex`.
    granter
        Agents that can be asked for leases of what is to be parked; None where requests bring tokens.
    on_parked, on_dropped
        Told of keys.

    Raises
    ------
    KvxferError
        As making a `Pool` does. ``invalid-argument``: less than one slab.
    """

    def __init__(
        self,
        own: OwnAgent,
        nbytes: int,
        *,
        slab_nbytes: int | None = None,
        quota_nbytes: int | None = None,
        quotas: Mapping[str, int | None] | None = None,
        max_pinned_nbytes: int | None = None,
        granter: Granter | None = None,
        on_parked: OnParked | None = None,
        on_dropped: OnDropped | None = None,
        huge_pages: bool = True,
    ) -> None:
        if slab_nbytes is None:
            slab_nbytes = min(max(nbytes // _NUM_SLABS, _LEAST_SLAB_NBYTES), nbytes)
            slab_nbytes -= slab_nbytes % _LEAST_SLAB_NBYTES if slab_nbytes > _LEAST_SLAB_NBYTES else 0
        if slab_nbytes < 1 or nbytes < slab_nbytes:
            raise invalid(f"a pool of {nbytes} bytes has no room for a slab of {slab_nbytes}")
        num_slabs = nbytes // slab_nbytes
        self._own = own
        self._pool = Pool(num_slabs, slab_nbytes, name="kvxfer-pages", huge_pages=huge_pages)
        #: What is where. Read only, but for `PageIndex.set_quota`.
        self.index = PageIndex(
            num_slabs,
            slab_nbytes,
            quota_nbytes=quota_nbytes,
            quotas=quotas,
            max_pinned_nbytes=max_pinned_nbytes,
        )
        self._jobs = PoolJobs()
        self._news = PageNews(on_parked, on_dropped)
        self._sources = PageSources(own, granter)
        self._regions = PoolRegions(own, self._pool.array(dtype=np.uint8), slab_nbytes)
        self._leases = PageLeases(own, self.index, self._regions)
        self._filling = Filling(own, self.index, self._regions, self._sources, self._jobs, self._news)

    async def aclose(self) -> None:
        """Ends what is under way, and lets the memory go. Close it before its agent. Idempotent."""
        await self._jobs.aclose()
        await self._leases.revoke(*self._leases.open)
        await self._regions.aclose()
        self._pool.close()

    # ---- parking ----------------------------------------------------------------------------

    async def park(
        self,
        salt: Salt,
        source: RemotePlace,
        blocks: Sequence[int],
        keys: Sequence[str],
        *,
        lease: LeaseToken | None = None,
        pin: bool = False,
        timeout_s: float = 30.0,
        priority: int = 0,
        integrity: bool | None = None,
        context: str = "",
    ) -> Parked:
        """Reads pages of an agent's region and keeps them; they are there for others once they are read.

        A key that is there, or is being parked by another call, is read by nobody: the second waits for the
        first. All others are read by one transfer: when that fails none of them stays. Cancelling ends the
        read; the places are given back once nothing lands in them any more.

        Parameters
        ----------
        salt, keys
            What the pages are found by: see `PageKey`; the layout is the region's.
        source
            Where they are read. The address of an agent that is attached need not be given.
        blocks
            A block of the region for each key.
        lease
            What allows the read. None asks an attached agent for one, which has to let the daemon grant
            (``daemon_may``).
        pin
            Whether they never give way.
        timeout_s
            Of the read.
        priority, integrity, context
            As in `Agent.read`.

        Returns
        -------
        Parked
            All `keys` are in it.

        Raises
        ------
        UsageError
            ``invalid-argument``, ``unknown-region``, ``not-permitted`` (the address).
        ExhaustedError
            No room: nothing was parked nor evicted.
        CallRefused, AgentGone
            The attached agent granted no lease.
        KvxferError
            The read failed.
        Exception
            What `on_parked` raised: what it was told of is not there.
        """
        self._jobs.check_open()
        if len(blocks) != len(keys) or not 0 < len(keys) <= MOST_PAGES:
            raise invalid(
                f"{len(keys)} keys are named for {len(blocks)} blocks; 1 to {MOST_PAGES} of each go"
            )
        how = {"timeout_s": timeout_s, "priority": priority, "integrity": integrity, "context": context}
        return await self._jobs.run(self._park(salt, source, blocks, keys, lease, pin, how))

    async def _park(
        self,
        salt: Salt,
        place: RemotePlace,
        blocks: Sequence[int],
        keys: Sequence[str],
        lease: LeaseToken | None,
        pin: bool,
        how: Mapping[str, Any],
    ) -> Parked:
        source = await self._sources.find(place)
        digest = layout_digest(source.region.layout)
        nbytes = page_nbytes(source.region.layout, self.index.slab_nbytes)
        wanted = {PageKey(*salt, digest, key): block for key, block in zip(keys, blocks, strict=True)}
        if len(wanted) != len(keys):
            raise invalid("a key is named twice among pages that are to be parked")
        parked = Parked([], [])
        while wanted:
            reserved = self.index.reserve(list(wanted), nbytes, time.monotonic())
            self._news.dropped(reserved.evicted, "evicted")
            self._regions.keep(self.index.layouts)
            for key in reserved.present:
                del wanted[key]
            parked.present.extend(reserved.present)
            others = self._filling.of(reserved.parking)
            if reserved.pages:
                from_blocks = [wanted.pop(page.key) for page in reserved.pages]
                await self._filling.fill(reserved.pages, source, from_blocks, lease, **how)
                parked.new.extend(page.key for page in reserved.pages)
            for other in others:
                await other.wait()
        if pin:
            self.index.pin([*parked.new, *parked.present])
        return parked

    # ---- reading ----------------------------------------------------------------------------

    @property
    def leases(self) -> Mapping[int, PageLease]:
        """Those that have not ended, by number; read only."""
        return self._leases.open

    def lease(self, keys: Sequence[PageKey], holder: str | None = None, ttl_s: float = 30.0) -> PageLease:
        """Lets a reader read pages, which stay until the lease ends. Those that are missing are named.

        The reader's agent, on whichever node, connects to the part's region and reads its blocks under its
        token.

        Parameters
        ----------
        keys
            Distinct, of one layout.
        holder
            The reader's name (``"decode-0/*"`` as in `Region.grant`), or None for whoever has the tokens.
        ttl_s
            How long; at most a day.

        Raises
        ------
        UsageError
            ``invalid-argument``.
        ExhaustedError
            Too many leases are open.
        """
        self._jobs.check_open()
        _check_named(keys)
        return self._leases.grant(keys, holder, ttl_s)

    def extend(self, number: int, ttl_s: float) -> PageLease:
        """Begins a lease's time anew; its tokens stay.

        Raises
        ------
        UsageError
            ``lease-ended``: it has ended, or never was.
        """
        return self._leases.extend(number, ttl_s)

    async def revoke(self, number: int) -> bool:
        """Ends a lease; when this returns nobody reads its pages under it.

        Returns whether there was one.
        """
        there = number in self._leases.open
        await self._leases.revoke(number)
        return there

    async def push(
        self,
        keys: Sequence[PageKey],
        target: RemotePlace,
        blocks: Sequence[int],
        *,
        lease: LeaseToken | None = None,
        notify: bytes = b"",
        timeout_s: float = 30.0,
        priority: int = 0,
        integrity: bool | None = None,
        context: str = "",
    ) -> int:
        """Writes pages into an agent's region, which has to let the daemon's agent write: all that are named.

        Parameters
        ----------
        keys, blocks
            Distinct pages of one layout, and the block of the region into which each goes.
        target
            The region. The address of an agent that is attached need not be given.
        lease
            The write lease that is meant, if one is.
        notify
            As in `Agent.write`.

        Returns
        -------
        int
            How many bytes of pages were written.

        Raises
        ------
        UsageError
            ``invalid-argument``; ``out-of-range``: a key is not there, and nothing was written.
        KvxferError
            The write failed.
        """
        self._jobs.check_open()
        _check_named(keys)
        if len(blocks) != len(keys):
            raise invalid(f"{len(keys)} keys are named for {len(blocks)} blocks")
        how = {"timeout_s": timeout_s, "priority": priority, "integrity": integrity, "context": context}
        return await self._jobs.run(self._push(keys, target, blocks, lease=lease, notify=notify, **how))

    async def _push(
        self, keys: Sequence[PageKey], target: RemotePlace, blocks: Sequence[int], **how: Any
    ) -> int:
        remote = (await self._sources.find(target)).region
        held, missing = self.index.hold(keys, time.monotonic())
        transfer: Transfer | None = None
        try:
            if missing:
                raise UsageError(
                    f"{len(missing)} of {len(keys)} pages are not parked, the first is {missing[0].key!r}",
                    code="out-of-range",
                )
            region = self._regions[keys[0].layout]
            transfer = self._own.agent.write(region, remote, [page.block for page in held], blocks, **how)
            await transfer
        finally:
            self._jobs.after(transfer, partial(self._release, held))
        return len(held) * page_nbytes(remote.layout)

    def _release(self, pages: list[Page]) -> None:
        self.index.release(pages, time.monotonic())

    # ---- steering ---------------------------------------------------------------------------

    def pin(self, keys: Iterable[PageKey], pinned: bool = True) -> list[PageKey]:
        """Has pages give way never, or again; returns those that are there. See `PageIndex.pin`."""
        self._jobs.check_open()
        return self.index.pin(keys, pinned)

    async def drop(self, keys: Sequence[PageKey], *, revoke: bool = True) -> list[PageKey]:
        """Takes pages away; when this returns they are read by nobody, and their memory is free.

        They are found no more from the call on. Those that are being parked are not there yet, and stay.

        Parameters
        ----------
        keys
            Those that are not there are passed over.
        revoke
            Whether leases on them are revoked, with all pages that these hold; if not they are waited for, as
            pushes are in any case.

        Returns
        -------
        list
            Those that were there.
        """
        self._jobs.check_open()
        pages = self.index.drop(keys)
        self._news.dropped([page.key for page in pages], "dropped")
        held = [page for page in pages if page.state is PageState.DROPPED]
        leases = self._leases.of(held)
        if revoke:
            await self._leases.revoke(*(leased.number for leased in leases))
        for leased in leases:
            await leased.ended.wait()
        while any(page.num_holds for page in held) and await self._jobs.one_ended():
            pass
        return [page.key for page in pages]

    # ---- telling ----------------------------------------------------------------------------

    def find(self, keys: Iterable[PageKey]) -> list[Page | None]:
        """Returns for each key the page that is parked, or None; no use of it."""
        return [self.index.find(key) for key in keys]

    def pages(self, tenant: str | None = None, after: int = 0, most: int = 1000) -> list[Page]:
        """Returns pages in the order of their parking, behind the one of serial `after`."""
        return self.index.pages(tenant, after, most)

    def stats(self) -> PoolStats:
        """Returns figures of now."""
        return PoolStats(self.index.stats(), len(self._leases.open), len(self._filling), self._pool.page_kind)


def _check_named(keys: Sequence[PageKey]) -> None:
    if not 0 < len(keys) <= MOST_PAGES or len(set(keys)) != len(keys):
        raise invalid(f"1 to {MOST_PAGES} distinct keys are named, not {len(keys)}")
    if len({key.layout for key in keys}) > 1:
        raise invalid("pages of one layout are named together, not of several")
