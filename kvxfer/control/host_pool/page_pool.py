"""Pages kept in the daemon's memory for its clients: parked, leased to readers, pushed, dropped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvxfer.control.host_pool.file_tier import FileTier
from kvxfer.control.host_pool.filling import Filling
from kvxfer.control.host_pool.page import Page, PageKey, PageState, Salt
from kvxfer.control.host_pool.page_index import IndexStats, PageIndex
from kvxfer.control.host_pool.page_layout import LINE_NBYTES, layout_digest, page_nbytes
from kvxfer.control.host_pool.page_leases import PageLease, PageLeases
from kvxfer.control.host_pool.page_news import OnDropped, OnParked, PageNews
from kvxfer.control.host_pool.page_sources import Granter, PageSources
from kvxfer.control.host_pool.pool_jobs import PoolJobs
from kvxfer.control.host_pool.pool_regions import PoolRegions
from kvxfer.control.host_pool.time_left import TimeLeft
from kvxfer.control.host_pool.write_behind import WriteBehind
from kvxfer.control.own.own_agent import OwnAgent, RemoteRegion
from kvxfer.errors import TransferError, UsageError, invalid
from kvxfer.lease_token import LeaseToken
from kvxfer.memory.page_files import BLOCK_NBYTES
from kvxfer.memory.pool import Pool
from kvxfer.transfer import Transfer

if TYPE_CHECKING:
    from kvxfer.memory.page_files import PageAnswer, PageEnd

#: Pages that one call may name. Each takes up to 10 us of the event loop if it evicts another page
#: (2-core x86, 2026-11-25), so one call delays the others by at most 40 ms.
MOST_PAGES: Final = 4096
# Enough for several models, each with pages in several slabs.
_NUM_SLABS: Final = 64
_LEAST_SLAB_NBYTES: Final = 2 * 1024 * 1024
# Of pages that are being written to files, and so cannot be evicted.
_MOST_WRITTEN_NBYTES: Final = 256 * 1024 * 1024
_LAST_WRITES_S: Final = 5.0


class Parked(NamedTuple):
    """The result of `PagePool.park`.

    Attributes
    ----------
    new
        Were read by this call, and are parked now.
    present
        Were parked before, or by another call meanwhile; this call did not read them.
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
    """Host memory of the daemon, in which pages of any layout are kept under keys.

    A page is one block of a cache, in all layers that its rank holds. With `files`, each page is also written
    there after it was parked, and is read from there when it is asked for and not in memory. Without, the
    pool is empty after a restart. All methods belong to one event loop. The memory is allocated when the pool
    is made.

    Parameters
    ----------
    own
        The daemon's agent, which reads and serves the pages.
    nbytes
        Size of the pool.
    slab_nbytes
        Size of the slabs, each of which holds pages of one layout; None for a 64th of the pool, at least 2
        MiB.
    quota_nbytes, quotas, max_pinned_nbytes
        As in `PageIndex`.
    granter
        Agents that can be asked for leases on what is to be parked; None if requests bring their tokens.
    on_parked, on_dropped
        Callbacks about keys: see `PageNews`.
    files
        The tier below memory; the pool closes it.

    Raises
    ------
    KvxferError
        As for making a `Pool`. ``invalid-argument``: the pool is smaller than one slab.
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
        files: FileTier | None = None,
    ) -> None:
        if slab_nbytes is None:
            slab_nbytes = min(max(nbytes // _NUM_SLABS, _LEAST_SLAB_NBYTES), nbytes)
            slab_nbytes -= slab_nbytes % _LEAST_SLAB_NBYTES if slab_nbytes > _LEAST_SLAB_NBYTES else 0
        if files is not None:
            slab_nbytes -= slab_nbytes % BLOCK_NBYTES
        if slab_nbytes < 1 or nbytes < slab_nbytes:
            raise invalid(f"a pool of {nbytes} bytes has no room for a slab of {slab_nbytes}")
        num_slabs = nbytes // slab_nbytes
        self._own = own
        self._pool = Pool(num_slabs, slab_nbytes, name="kvxfer-pages", huge_pages=huge_pages)
        #: Which pages lie where. Read only, except for `PageIndex.set_quota`.
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
        alignment_nbytes = LINE_NBYTES if files is None else BLOCK_NBYTES
        self._regions = PoolRegions(
            own,
            self._pool.array(dtype=np.uint8),
            slab_nbytes,
            alignment_nbytes,
            files.layout if files is not None else lambda digest: None,
        )
        self._leases = PageLeases(own, self.index, self._regions)
        self._filling = Filling(own, self.index, self._regions, self._sources, self._jobs, self._news)
        #: The tier below memory, or None.
        self.files = files
        #: Writes to `files`, or None.
        self.behind: WriteBehind | None = None
        if files is not None:
            files.bound_of = self.index.bound_of
            most_nbytes = min(_MOST_WRITTEN_NBYTES, nbytes // 4)
            self.behind = WriteBehind(files, self.index, self._regions, self._jobs, most_nbytes)

    async def aclose(self) -> None:
        """Ends everything in progress, and frees the memory. Close the pool before its agent. Idempotent.

        Pages that are still to be written to files are written first, for a few seconds.
        """
        self._jobs.close()
        if self.files is not None and self.behind is not None:
            await self.behind.drained(_LAST_WRITES_S)
            await self.files.aclose(self._regions.memory)
        await self._jobs.aclose()
        await self._leases.revoke(*self._leases.open)
        await self._regions.aclose()
        self._pool.close()

    # ---- parking ----------------------------------------------------------------------------

    async def park(
        self,
        salt: Salt,
        source: RemoteRegion,
        blocks: Sequence[int],
        keys: Sequence[str],
        *,
        lease: LeaseToken | None = None,
        pin: bool = False,
        durable: bool = False,
        timeout_s: float = 30.0,
        priority: int = 0,
        integrity: bool | None = None,
        context: str = "",
    ) -> Parked:
        """Reads pages of an agent's region and keeps them; others can find them once they are read.

        This does not read a key that is parked already, or that another call is parking: for the latter it
        waits until the other call has ended. It reads all other keys in one transfer. If that fails, none of
        them is kept. Cancelling ends the read; the places are given back when nothing can land in them any
        more.

        Parameters
        ----------
        salt, keys
            The pages' keys: see `PageKey`. The layout is the region's.
        source
            The region to read from. The address of an attached agent may be left out.
        blocks
            One block of the region for each key.
        lease
            Permits the read. None asks an attached agent for a lease; the agent has to let the daemon grant
            (``daemon_may``).
        pin
            Whether to pin the pages, which protects them from eviction.
        durable
            Whether to return only when the pages would survive a loss of power. If that is not possible the
            call fails, and the pages are parked.
        timeout_s
            Deadline of the call, with all of its waits: for the agent, for other calls, and for the read.
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
            There is no room, or no more may be pinned. Nothing was parked, and nothing was evicted. Only if
            another call failed to park some of the keys, the other keys may be parked.
        CallRefused, AgentGone
            The attached agent granted no lease.
        KvxferError
            The read failed. ``deadline``: the time was over.
        TimeoutError
            The attached agent did not answer in time.
        Exception
            The exception of `on_parked`; the pages that it was called for are not parked.
        """
        self._jobs.check_open()
        if len(blocks) != len(keys) or not 0 < len(keys) <= MOST_PAGES:
            raise invalid(
                f"keys: {len(keys)}, blocks: {len(blocks)}; name 1 to {MOST_PAGES} keys, with a block each"
            )
        left = TimeLeft(timeout_s)
        how = {"priority": priority, "integrity": integrity, "context": context}
        if durable and self.behind is None:
            raise UsageError("this pool has no files: no page of it is durable", code="unsupported")
        parked = await self._jobs.run(self._park(salt, source, blocks, keys, lease, pin, left, how))
        if durable and self.behind is not None:
            writing = self.behind.durable([*parked.new, *parked.present])
            await left.wait(self._jobs.run(writing), "the pages were on disk")
        return parked

    async def _park(
        self,
        salt: Salt,
        place: RemoteRegion,
        blocks: Sequence[int],
        keys: Sequence[str],
        lease: LeaseToken | None,
        pin: bool,
        left: TimeLeft,
        how: Mapping[str, Any],
    ) -> Parked:
        source = await left.wait(self._sources.find(place), f"the region {place.region!r} was found")
        digest = layout_digest(source.region.layout)
        nbytes = self._regions.page_nbytes(source.region.layout)
        wanted = {PageKey(*salt, digest, key): block for key, block in zip(keys, blocks, strict=True)}
        if len(wanted) != len(keys):
            raise invalid("the pages to park contain a key twice")
        in_files: list[PageKey] = []
        if pin:
            await self._load([*wanted], left)
        elif self.files is not None:
            absent = [key for key in wanted if self.index.find(key) is None]
            there = self.files.look_up(absent, counts=True)
            in_files = [key for key, is_there in zip(absent, there, strict=True) if is_there]
        for key in in_files:
            del wanted[key]
        parked = Parked([], in_files)
        kept: list[Page] = []  # so that none of them is evicted before the answer
        promised_nbytes = 0
        try:
            while wanted:
                reserved = self.index.reserve(list(wanted), nbytes, time.monotonic(), pinned=pin)
                try:
                    promised_nbytes += reserved.promised_nbytes
                    kept += self.index.keep(reserved.present)
                    self._news.dropped(self._lost(reserved.evicted), "evicted")
                    self._regions.keep(self.index.layouts)
                    others = self._filling.of(reserved.parking)
                    for key in reserved.present:
                        del wanted[key]
                    from_blocks = [wanted.pop(page.key) for page in reserved.pages]
                except BaseException:
                    self.index.abort(reserved.pages)
                    raise
                parked.present.extend(reserved.present)
                if reserved.pages:
                    await self._filling.fill(reserved.pages, source, from_blocks, lease, left, **how)
                    new = [page.key for page in reserved.pages]
                    kept += self.index.keep(new)
                    parked.new.extend(new)
                    if self.behind is not None:
                        self.behind.add(reserved.pages)
                for other in others:
                    await left.wait(other.wait(), "another call had parked some of these pages")
            if pin:
                promised_nbytes, ending = 0, promised_nbytes
                self.index.pin([*parked.new, *parked.present], promised_nbytes=ending)
        finally:
            self.index.pin((), promised_nbytes=promised_nbytes)
            self.index.release(kept, time.monotonic())
        return parked

    # ---- reading ----------------------------------------------------------------------------

    async def load(self, keys: Sequence[PageKey], timeout_s: float, worth_s: float | None = None) -> None:
        """Reads those of the pages that are in files alone into memory, where `lease` and `push` find them.

        What cannot be read is missing afterwards: its bytes were damaged, the disk failed, or there was no
        room.

        Parameters
        ----------
        keys
            Distinct, of one layout.
        worth_s
            How long computing the pages would take, or None.

        Raises
        ------
        TransferError
            ``deadline``: the time is over. ``refused``: by what is known of the disk, reading would take
            longer than `worth_s`; nothing was read.
        """
        self._jobs.check_open()
        _check_named(keys)
        await self._jobs.run(self._load(keys, TimeLeft(timeout_s), worth_s))

    async def _load(self, keys: Sequence[PageKey], left: TimeLeft, worth_s: float | None = None) -> None:
        if self.files is None:
            return
        absent = [key for key in keys if self.index.find(key) is None]
        there = self.files.look_up(absent, counts=True)
        wanted = [key for key, is_there in zip(absent, there, strict=True) if is_there]
        layout = self.files.layout(keys[0].layout)
        if not wanted or layout is None:
            return
        if worth_s is not None:
            takes_s = self.files.read_s(self._regions.nbytes_in_files(layout), len(wanted))
            if takes_s > worth_s:
                raise TransferError(
                    f"too slow: reading {len(wanted)} pages from files would take about {takes_s:.3g} s, and "
                    f"computing them {worth_s:.3g} s",
                    code="refused",
                )
        await self._filling.load(self.files, wanted, layout, left)

    def _lost(self, evicted: Sequence[PageKey]) -> list[PageKey]:
        """Returns those of the evicted pages that are not in files either."""
        if self.files is None or not evicted:
            return [*evicted]
        there = self.files.look_up(evicted)
        return [key for key, is_there in zip(evicted, there, strict=True) if not is_there]

    @property
    def leases(self) -> Mapping[int, PageLease]:
        """Leases that have not ended, by number; read only."""
        return self._leases.open

    def lease(self, keys: Sequence[PageKey], holder: str | None = None, ttl_s: float = 30.0) -> PageLease:
        """Lets a reader read pages, which stay until the lease ends; the lease names the missing ones.

        The reader's agent may be on any node. It connects to the part's region and reads the part's blocks
        under the part's token.

        Parameters
        ----------
        keys
            Distinct, of one layout.
        holder
            The reader's name (``"decode-0/*"`` as in `Region.grant`), or None for any agent that has the
            tokens.
        ttl_s
            How long the lease lasts; at most a day.

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
            ``lease-ended``: the lease has ended, or never existed.
        """
        return self._leases.extend(number, ttl_s)

    async def revoke(self, number: int) -> bool:
        """Ends a lease; when this returns, nothing reads its pages under it.

        Returns whether there was one.
        """
        there = number in self._leases.open
        await self._leases.revoke(number)
        return there

    async def push(
        self,
        keys: Sequence[PageKey],
        target: RemoteRegion,
        blocks: Sequence[int],
        *,
        lease: LeaseToken | None = None,
        notify: bytes = b"",
        timeout_s: float = 30.0,
        priority: int = 0,
        integrity: bool | None = None,
        context: str = "",
    ) -> int:
        """Writes all named pages into an agent's region; the agent has to permit the daemon's agent to write.

        Parameters
        ----------
        keys, blocks
            Distinct pages of one layout, and for each the block of the region that it goes to.
        target
            The region. The address of an attached agent may be left out.
        lease
            The write lease to use; None if there is none.
        notify
            As in `Agent.write`.
        timeout_s
            Deadline of the call, with the wait for the agent.

        Returns
        -------
        int
            How many bytes of pages were written.

        Raises
        ------
        UsageError
            ``invalid-argument``; ``out-of-range``: a key is not parked, and nothing was written.
        KvxferError
            The write failed.
        """
        self._jobs.check_open()
        _check_named(keys)
        if len(blocks) != len(keys):
            raise invalid(f"keys: {len(keys)}, blocks: {len(blocks)}; name one block for each key")
        left = TimeLeft(timeout_s)
        how = {"priority": priority, "integrity": integrity, "context": context}
        return await self._jobs.run(self._push(keys, target, blocks, left, lease=lease, notify=notify, **how))

    async def _push(
        self, keys: Sequence[PageKey], target: RemoteRegion, blocks: Sequence[int], left: TimeLeft, **how: Any
    ) -> int:
        finding = self._sources.find(target)
        remote = (await left.wait(finding, f"the region {target.region!r} was found")).region
        held, missing = self.index.hold(keys, time.monotonic())
        transfer: Transfer | None = None
        try:
            if missing:
                raise UsageError(
                    f"{len(missing)} of {len(keys)} pages are not parked; the first is {missing[0].key!r}",
                    code="out-of-range",
                )
            region = self._regions[keys[0].layout]
            how["timeout_s"] = left.left_s
            transfer = self._own.agent.write(region, remote, [page.block for page in held], blocks, **how)
            await transfer
        finally:
            self._jobs.after(transfer, partial(self._release, held))
        return len(held) * page_nbytes(remote.layout)

    def _release(self, pages: list[Page]) -> None:
        self.index.release(pages, time.monotonic())

    # ---- steering ---------------------------------------------------------------------------

    def pin(self, keys: Iterable[PageKey], pinned: bool = True) -> list[PageKey]:
        """Pins pages, or unpins them; returns those that are there. See `PageIndex.pin`."""
        self._jobs.check_open()
        return self.index.pin(keys, pinned)

    async def drop(self, keys: Sequence[PageKey], *, revoke: bool = True) -> list[PageKey]:
        """Removes pages; when this returns, nothing reads them, and their memory is free.

        The pages cannot be found from the start of the call. Pages that are being parked are not affected.

        Parameters
        ----------
        keys
            Keys that are not parked are ignored.
        revoke
            Whether to revoke the leases on the pages, with all other pages of these leases. If not, this
            waits for them. It waits for pushes in either case.

        Returns
        -------
        list
            The pages that were there.
        """
        self._jobs.check_open()
        pages = self.index.drop(keys)
        dropped = dict.fromkeys(page.key for page in pages)
        loading = self._filling.drop_loading(keys)
        erasing: list[asyncio.Future[PageEnd | PageAnswer]] = []
        if self.files is not None:
            in_files, erasing = self.files.drop(keys)
            dropped |= dict.fromkeys(in_files)
        self._news.dropped([*dropped], "dropped")
        held = [page for page in pages if page.state is PageState.DROPPED]
        leases = self._leases.of(held)
        if revoke:
            await self._leases.revoke(*(leased.number for leased in leases))
        for leased in leases:
            await leased.ended.wait()
        while any(page.num_holds for page in held) and await self._jobs.one_ended():
            pass
        for read in loading:
            await read.wait()
        if any(how in ("failed", "out") for how in await asyncio.gather(*erasing)):
            raise TransferError(
                f"{len(dropped)} pages are dropped, but not erased from their files, since the disk does not "
                "work: some may be found again after a restart",
                code="refused",
            )
        return [*dropped]

    # ---- telling ----------------------------------------------------------------------------

    def find(self, keys: Iterable[PageKey]) -> list[Page | None]:
        """Returns for each key the parked page, or None; this does not count as a use."""
        return [self.index.find(key) for key in keys]

    def pages(self, tenant: str | None = None, after: int = 0, most: int = 1000) -> list[Page]:
        """Returns pages in the order of their parking, after the one of serial `after`."""
        return self.index.pages(tenant, after, most)

    def stats(self) -> PoolStats:
        """Returns the current figures."""
        return PoolStats(self.index.stats(), len(self._leases.open), len(self._filling), self._pool.page_kind)


def _check_named(keys: Sequence[PageKey]) -> None:
    if not 0 < len(keys) <= MOST_PAGES or len(set(keys)) != len(keys):
        raise invalid(f"name 1 to {MOST_PAGES} distinct keys, not {len(keys)}")
    if len({key.layout for key in keys}) > 1:
        raise invalid("name only pages of one layout together")
