"""Pages kept in the daemon's memory for those who ask: parked, leased to readers, pushed, dropped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import numpy as np

from kvxfer.control.own_agent import OwnAgent, RemotePlace
from kvxfer.control.own_leases import MOST_LEASES, OwnLease
from kvxfer.control.page_index import IndexStats, Page, PageIndex, PageKey, PageState, TenantUse
from kvxfer.control.page_layout import digest_of, page_nbytes, slab_layout
from kvxfer.errors import ExhaustedError, KvxferError, UsageError, invalid, largest_loss
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.lease_token import LeaseToken
from kvxfer.log import logger
from kvxfer.memory.pool import Pool
from kvxfer.region import Region, RegionDescriptor
from kvxfer.transfer import Transfer

T = TypeVar("T")

#: Pages that one call may name. Each takes up to 10 us of the event loop, where it evicts another
#: (2-core x86, 2026-11-25): so a call holds up others for 40 ms at most.
MOST_PAGES: Final = 4096
# Enough slabs for several models, each with pages in several: and few regions for peers to be told of.
_NUM_SLABS: Final = 64
_LEAST_SLAB_NBYTES: Final = 2 * 1024 * 1024
# A lease on what is parked outlives the read by so much; it is revoked when the read has ended.
_GRANT_MARGIN_S: Final = 10.0
_GRANT_TIMEOUT_S: Final = 10.0


class AttachedAgent(Protocol):
    """What the pool needs to know of an agent that is attached to the daemon."""

    @property
    def name(self) -> str: ...
    @property
    def incarnation(self) -> str: ...
    @property
    def address(self) -> str: ...


class Granter(Protocol):
    """Agents that can be asked for leases: `kvxfer.control.attachments.Attachments`."""

    @property
    def agents(self) -> Mapping[str, Any]:
        """Those that are attached (`AttachedAgent`), by incarnation."""
        ...

    async def call(
        self, incarnation: str, verb: str, args: Mapping[str, Any], timeout_s: float = 10.0
    ) -> dict[str, Any]:
        """Has one do something."""
        ...


class Salt(NamedTuple):
    """What a page's key is salted by, beside its layout: see `PageKey`."""

    tenant: str
    model: str
    revision: str


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


class LeasedPages(NamedTuple):
    """Pages of one slab that a reader may read.

    Attributes
    ----------
    region
        Where they lie: the reader's agent connects to it, and reads from it.
    keys, blocks
        Of each page its key and its block in the region.
    token
        What the reader passes as ``lease=``.
    """

    region: RegionDescriptor
    keys: list[PageKey]
    blocks: list[int]
    token: LeaseToken


@dataclass(slots=True, eq=False)
class PageLease:
    """Pages that stay where they are for a reader, until it ends.

    Attributes
    ----------
    number
        By which it is named here; never reused.
    holder
        Who may read: an agent's name, or None for whoever has the tokens.
    parts
        What to read, one for each slab.
    missing
        Keys that were asked for and are not there.
    expires_at
        By the event loop's clock (CLOCK_MONOTONIC).
    """

    number: int
    holder: str | None
    parts: list[LeasedPages]
    missing: list[PageKey]
    expires_at: float
    _own: dict[int, tuple[OwnLease, list[Page]]] = field(default_factory=dict)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)


class PoolStats(NamedTuple):
    """Figures of a `PagePool`."""

    pages: IndexStats
    num_leases: int
    num_parking: int
    page_kind: str


#: Says before pages are acknowledged that they are there. What it raises ends the parking.
OnParked = Callable[[list[PageKey]], Awaitable[None]]
#: Says that pages are gone, and why: ``"dropped"`` or ``"evicted"``. Must not block.
OnDropped = Callable[[list[PageKey], str], None]


class PagePool:
    """Host memory of the daemon's, in which pages of any layout are kept under keys.

    A page is one block of a cache, in all layers that its rank holds. Nothing is durable: the pool is empty
    after a restart. All methods belong to one event loop; memory is taken when it is first filled.

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
        self._bytes = self._pool.array()
        #: What is where. Read only, but for `PageIndex.set_quota`.
        self.index = PageIndex(
            num_slabs,
            slab_nbytes,
            quota_nbytes=quota_nbytes,
            quotas=quotas,
            max_pinned_nbytes=max_pinned_nbytes,
        )
        self._granter = granter
        self._on_parked = on_parked
        self._on_dropped = on_dropped
        self._regions: dict[int, asyncio.Task[Region]] = {}
        self._num_regions = 0
        self._parking: dict[PageKey, asyncio.Event] = {}
        #: Leases that have not ended, by number. Read only.
        self.leases: dict[int, PageLease] = {}
        self._last_lease = 0
        self._jobs: set[asyncio.Task[Any]] = set()
        self._reaping: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def aclose(self) -> None:
        """Ends what is under way, and lets the memory go. Close it before its agent. Idempotent."""
        self._is_closed = True
        for number in list(self.leases):
            await self.revoke(number)
        while self._jobs:
            for job in self._jobs:
                job.cancel()
            await asyncio.wait(self._jobs)
        if self._reaping:
            await asyncio.wait(self._reaping)
        for task in list(self._regions.values()):
            await asyncio.wait([task])
            if not task.cancelled() and task.exception() is None and not self._own.agent.closed:
                await task.result().deregister()
        self._regions.clear()
        self._bytes = np.empty(0, np.uint8)
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
        """Reads pages of an agent's region and keeps them; each is there for others once it is read.

        A key that is there, or is being parked by another call, is read by nobody: the second waits for the
        first. What was read stays when the rest fails. Cancelling ends the reads; their places are given
        back once nothing lands in them any more.

        Parameters
        ----------
        salt, keys
            What the pages are found by: see `PageKey`; the layout is the region's.
        source
            Where they are read. The address of an agent that is attached need not be given.
        blocks
            A block of the region for each key.
        lease
            What allows the reads. None asks an attached agent for one, which has to let the daemon grant
            (``daemon_may``), and needs none for a region of the daemon's own agent.
        pin
            Whether they never give way.
        timeout_s
            Of each read.
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
            A read failed; the largest loss of several.
        Exception
            What `on_parked` raised: what it was told of is not there.
        """
        self._check_open()
        if len(blocks) != len(keys) or not 0 < len(keys) <= MOST_PAGES:
            raise invalid(
                f"{len(keys)} keys are named for {len(blocks)} blocks; 1 to {MOST_PAGES} of each go"
            )
        return await self._job(
            self._park(salt, source, blocks, keys, lease, pin, timeout_s, priority, integrity, context)
        )

    async def _park(
        self,
        salt: Salt,
        source: RemotePlace,
        blocks: Sequence[int],
        keys: Sequence[str],
        lease: LeaseToken | None,
        pin: bool,
        timeout_s: float,
        priority: int,
        integrity: bool | None,
        context: str,
    ) -> Parked:
        remote = await self._source(source)
        digest, nbytes = digest_of(remote.layout), page_nbytes(remote.layout)
        wanted = {PageKey(*salt, digest, key): block for key, block in zip(keys, blocks, strict=True)}
        if len(wanted) != len(keys):
            raise invalid("a key is named twice among pages that are to be parked")
        parked = Parked([], [])
        while wanted:
            reserved = self.index.reserve(list(wanted), nbytes, time.monotonic())
            if reserved.evicted:
                self._tell_dropped(reserved.evicted, "evicted")
            for slab in reserved.formatted:
                self._format(slab, remote.layout)
            for key in reserved.present:
                del wanted[key]
            parked.present.extend(reserved.present)
            others = [self._parking[key] for key in reserved.parking]
            if reserved.pages:
                from_blocks = [wanted.pop(page.key) for page in reserved.pages]
                filling = _Filling(self, remote, source, lease, reserved.pages, from_blocks)
                parked.new.extend(await filling.run(timeout_s, priority, integrity, context))
            for other in others:
                await other.wait()
        if pin:
            self.index.pin([*parked.new, *parked.present])
        return parked

    async def _source(self, source: RemotePlace) -> RegionDescriptor:
        """Returns where pages are read."""
        if source.agent in (self._own.name, self._own.incarnation):
            raise UsageError(
                f"{self._own.name} has the pool itself: pages are parked from, and pushed to, other agents",
                code="unsupported",
            )
        attached = self._attached(source.agent)
        if attached is not None:
            source = source._replace(agent=attached.incarnation, address=attached.address)
        return await self._own.remote_region(source, is_known=attached is not None)

    def _attached(self, agent: str) -> AttachedAgent | None:
        if self._granter is None or not agent:
            return None
        if (found := self._granter.agents.get(agent)) is not None:
            first: AttachedAgent = found
            return first
        named = [each for each in self._granter.agents.values() if each.name == agent]
        if len(named) > 1:
            raise invalid(f"{len(named)} agents named {agent!r} are attached: name one by its incarnation")
        return named[0] if named else None

    async def _granted(
        self, source: RemotePlace, region: RegionDescriptor, blocks: list[int], timeout_s: float
    ) -> tuple[str, dict[str, Any]] | None:
        """Asks an attached agent for a lease; None for any other agent."""
        attached = self._attached(source.agent)
        if attached is None or self._granter is None:
            return None
        args = {
            "region": region.name,
            "holder": self._own.name,
            "blocks": blocks,
            "mode": "read",
            "ttl_s": timeout_s + _GRANT_MARGIN_S,
        }
        answer = await self._granter.call(attached.incarnation, "grant.grant", args, _GRANT_TIMEOUT_S)
        return attached.incarnation, answer

    async def _give_back(self, incarnation: str, answer: dict[str, Any]) -> None:
        """Ends a lease that an attached agent granted; what fails ends it by its time."""
        assert self._granter is not None
        try:
            args = {"lease": answer["lease"]}
            await self._granter.call(incarnation, "grant.revoke", args, _GRANT_TIMEOUT_S)
        except Exception as error:
            logger().info("kvxfer: a lease of %s is left to its time: %r", incarnation, error)

    # ---- slabs ------------------------------------------------------------------------------

    def _format(self, slab: int, layout: KVLayout) -> None:
        """Begins to make a slab a region of pages of `layout`."""
        before = self._regions.get(slab)
        task = asyncio.create_task(self._formatted(slab, layout, before), name=f"slab {slab}")
        task.add_done_callback(_looked_at)  # those who waited may have been cancelled
        self._regions[slab] = task

    async def _formatted(self, slab: int, layout: KVLayout, before: asyncio.Task[Region] | None) -> Region:
        if before is not None:
            await asyncio.wait([before])
            if not before.cancelled() and before.exception() is None:
                await before.result().deregister()
        nbytes = self.index.slab_nbytes
        self._num_regions += 1
        name = self._own.region_name("pool", str(self._num_regions))
        memory = self._bytes[slab * nbytes : (slab + 1) * nbytes]
        return self._own.register(name, memory, slab_layout(layout, nbytes // page_nbytes(layout)))

    async def _region(self, slab: int) -> Region:
        """Returns a slab's region when it is made."""
        return await asyncio.shield(self._regions[slab])

    def _slab_is_broken(self, slab: int) -> bool:
        task = self._regions[slab]
        return task.done() and (task.cancelled() or task.exception() is not None)

    def _made(self, slab: int) -> Region:
        """Returns the region of a slab that has parked pages."""
        return self._regions[slab].result()

    # ---- reading ----------------------------------------------------------------------------

    def lease(self, keys: Sequence[PageKey], holder: str | None = None, ttl_s: float = 30.0) -> PageLease:
        """Lets a reader read pages, which stay until the lease ends. Those that are missing are named.

        The reader's agent, on whichever node, connects to each part's region and reads its blocks under its
        token.

        Parameters
        ----------
        keys
            Distinct.
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
        self._check_open()
        if len(set(keys)) != len(keys) or not 0 < len(keys) <= MOST_PAGES:
            raise invalid(f"1 to {MOST_PAGES} distinct keys are leased, not {len(keys)}")
        by_slab: dict[int, list[Page]] = {}
        held, missing = self.index.hold(keys, time.monotonic())
        for page in held:
            by_slab.setdefault(page.slab, []).append(page)
        self._last_lease += 1
        now = asyncio.get_running_loop().time()
        leased = PageLease(self._last_lease, holder, [], missing, now + ttl_s)
        try:
            if len(self._own.leases) + len(by_slab) > MOST_LEASES:
                raise ExhaustedError(f"{MOST_LEASES} leases are open: revoke some", code="exhausted")
            for slab in list(by_slab):
                region = self._made(slab)
                pages = by_slab[slab]
                own = self._own.grant(
                    region.name,
                    holder,
                    [page.block for page in pages],
                    "read",
                    ttl_s,
                    on_end=lambda own: self._part_ended(leased, own),
                )
                del by_slab[slab]
                leased._own[own.number] = own, pages
                part = LeasedPages(
                    region.descriptor, [page.key for page in pages], [page.block for page in pages], own.token
                )
                leased.parts.append(part)
                leased.expires_at = own.expires_at
        except BaseException:
            self.index.release([page for pages in by_slab.values() for page in pages], time.monotonic())
            for own, _ in leased._own.values():
                self._own.leases.end(own, "revoked")
            raise
        if leased.parts:
            self.leases[leased.number] = leased
        else:
            leased._ended.set()
        return leased

    def _part_ended(self, leased: PageLease, own: OwnLease) -> None:
        _, pages = leased._own.pop(own.number)
        self.index.release(pages, time.monotonic())
        if not leased._own:
            self.leases.pop(leased.number, None)
            leased._ended.set()

    def extend(self, number: int, ttl_s: float) -> PageLease:
        """Begins a lease's time anew; its tokens stay.

        Raises
        ------
        UsageError
            ``lease-ended``: it has ended, or never was.
        """
        leased = self.leases.get(number)
        if leased is None:
            raise UsageError(f"lease {number} has ended, or never was: take another", code="lease-ended")
        for each in list(leased._own):
            leased.expires_at = self._own.extend(each, ttl_s).expires_at
        return leased

    async def revoke(self, number: int) -> bool:
        """Ends a lease; when this returns nobody reads its pages under it.

        Returns whether there was one.
        """
        leased = self.leases.get(number)
        if leased is None:
            return False
        for own, _ in list(leased._own.values()):
            self._own.leases.end(own, "revoked")
        await leased._ended.wait()
        return True

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
            Pages, and the block of the region into which each goes.
        target
            The region. The address of an agent that is attached need not be given.
        lease
            The write lease that is meant, if one is.
        notify
            As in `Agent.write`, delivered with the last part: or the tag that the agent expects, for all.

        Returns
        -------
        int
            How many bytes of pages were written.

        Raises
        ------
        UsageError
            ``invalid-argument``; ``out-of-range``: a key is not there, and nothing was written.
        KvxferError
            A write failed; the largest loss of several.
        """
        self._check_open()
        if len(blocks) != len(keys) or not 0 < len(keys) <= MOST_PAGES or len(set(keys)) != len(keys):
            raise invalid(f"{len(keys)} distinct keys are named for {len(blocks)} blocks")
        return await self._job(
            self._push(keys, target, blocks, lease, notify, timeout_s, priority, integrity, context)
        )

    async def _push(
        self,
        keys: Sequence[PageKey],
        target: RemotePlace,
        blocks: Sequence[int],
        lease: LeaseToken | None,
        notify: bytes,
        timeout_s: float,
        priority: int,
        integrity: bool | None,
        context: str,
    ) -> int:
        remote = await self._source(target)
        held, missing = self.index.hold(keys, time.monotonic())
        transfers: list[tuple[Transfer, list[Page]]] = []
        posted: set[Page] = set()
        try:
            if missing:
                raise UsageError(
                    f"{len(missing)} of {len(keys)} pages are not parked, the first is {missing[0].key!r}",
                    code="out-of-range",
                )
            groups = _by_slab(held, blocks)
            for slab, (pages, dst) in groups.items():
                transfer = self._own.agent.write(
                    self._made(slab),
                    remote,
                    [page.block for page in pages],
                    dst,
                    lease=lease,
                    notify=notify,
                    timeout_s=timeout_s,
                    priority=priority,
                    integrity=integrity,
                    context=context,
                )
                transfers.append((transfer, pages))
                posted.update(pages)
            await _all_ended([transfer for transfer, _ in transfers])
        finally:
            for transfer, pages in transfers:
                self._after(transfer, partial(self._release, pages))
            self._release([page for page in held if page not in posted])
        _raise_losses([transfer for transfer, _ in transfers])
        return sum(page.nbytes for page in held)

    # ---- steering ---------------------------------------------------------------------------

    def pin(self, keys: Iterable[PageKey], pinned: bool = True) -> list[PageKey]:
        """Has pages give way never, or again; returns those that are there. See `PageIndex.pin`."""
        self._check_open()
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
        self._check_open()
        pages = self.index.drop(keys)
        if not pages:
            return []
        self._tell_dropped([page.key for page in pages], "dropped")
        held = {page for page in pages if page.state is PageState.DROPPED}
        if held:
            leases = [
                leased
                for leased in self.leases.values()
                if any(not held.isdisjoint(of_part) for _, of_part in leased._own.values())
            ]
            if revoke:
                for leased in leases:
                    for own, _ in list(leased._own.values()):
                        self._own.leases.end(own, "revoked")
            for leased in leases:
                await leased._ended.wait()
            while any(page.num_holds for page in held) and (jobs := self._jobs | self._reaping):
                await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        return [page.key for page in pages]

    # ---- telling ----------------------------------------------------------------------------

    def find(self, keys: Iterable[PageKey]) -> list[Page | None]:
        """Returns for each key the page that is parked, or None; no use of it."""
        return [self.index.find(key) for key in keys]

    def pages(self, tenant: str | None = None, after: int = 0, most: int = 1000) -> list[Page]:
        """Returns pages in the order of their parking, behind the one of serial `after`."""
        return self.index.pages(tenant, after, most)

    def tenants(self) -> Mapping[str, TenantUse]:
        """Returns what each tenant has."""
        return self.index.tenants()

    def stats(self) -> PoolStats:
        """Returns figures of now."""
        return PoolStats(self.index.stats(), len(self.leases), len(self._parking), self._pool.page_kind)

    # ---- inside -----------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise _closed()

    async def _job(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs work that `aclose` ends; cancelling the caller cancels it, which gives back all by itself."""
        task = self._spawn(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._is_closed:
                raise _closed() from None
            task.cancel()
            raise

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs work that ends in time, or when the pool is closed."""
        task = asyncio.create_task(work)
        self._jobs.add(task)
        task.add_done_callback(self._spawned)
        return task

    def _spawned(self, task: asyncio.Task[Any]) -> None:
        self._jobs.discard(task)
        _looked_at(task)

    def _after(self, transfer: Transfer, then: Callable[[], None]) -> None:
        """Calls `then` when nothing of a transfer moves any more: now, where it has ended."""
        if transfer.state != "pending" or self._own.agent.closed:
            then()
            return
        transfer.cancel()
        # Its own task: the pool's closing waits for it, and does not cancel it.
        reaping = asyncio.create_task(self._reaped(transfer, then))
        self._reaping.add(reaping)
        reaping.add_done_callback(self._reaping.discard)

    async def _reaped(self, transfer: Transfer, then: Callable[[], None]) -> None:
        try:
            await _ended(transfer)
        finally:
            then()

    def _release(self, pages: list[Page]) -> None:
        self.index.release(pages, time.monotonic())

    def _tell_dropped(self, keys: list[PageKey], why: str) -> None:
        if self._on_dropped is None:
            return
        try:
            self._on_dropped(keys, why)
        except Exception as error:
            logger().error("kvxfer: telling of %d %s pages: %r", len(keys), why, error)


class _Filling:
    """Places that one call has reserved, from their reading to their commit, or to their giving back.

    Parameters
    ----------
    pages, blocks
        What is to be filled, and from which blocks of `remote`.
    """

    def __init__(
        self,
        pool: PagePool,
        remote: RegionDescriptor,
        source: RemotePlace,
        lease: LeaseToken | None,
        pages: list[Page],
        blocks: list[int],
    ) -> None:
        self._pool = pool
        self._remote = remote
        self._source = source
        self._lease = lease
        self._pages = pages
        self._blocks = blocks
        for page in pages:
            pool._parking[page.key] = asyncio.Event()

    async def run(
        self, timeout_s: float, priority: int, integrity: bool | None, context: str
    ) -> list[PageKey]:
        """Reads the pages and makes them visible; returns their keys. What fails gives all others back."""
        pool = self._pool
        left = set(self._pages)
        transfers: list[tuple[Transfer, list[Page]]] = []
        granted = None
        told: list[PageKey] = []
        keys: list[PageKey] = []
        try:
            groups = _by_slab(self._pages, self._blocks)
            regions = {slab: await pool._region(slab) for slab in groups}
            token = self._lease
            if token is None:
                granted = await pool._granted(self._source, self._remote, self._blocks, timeout_s)
                token = None if granted is None else LeaseToken.parse(granted[1]["token"])
            for slab, (pages, blocks) in groups.items():
                transfer = pool._own.agent.read(
                    regions[slab],
                    self._remote,
                    blocks,
                    [page.block for page in pages],
                    lease=token,
                    timeout_s=timeout_s,
                    priority=priority,
                    integrity=integrity,
                    context=context,
                )
                transfers.append((transfer, pages))
            await _all_ended([transfer for transfer, _ in transfers])
            read = [page for transfer, pages in transfers if transfer.succeeded for page in pages]
            keys = [page.key for page in read]
            if keys and pool._on_parked is not None:
                told = keys
                await pool._on_parked(keys)
            pool.index.commit(read, time.monotonic())
            told = []
            left.difference_update(read)
            self._tell(read)
        finally:
            if told:
                pool._tell_dropped(told, "dropped")
            if granted is not None:
                pool._spawn(pool._give_back(*granted))
            for transfer, pages in transfers:
                if not left.isdisjoint(pages):
                    left.difference_update(pages)
                    pool._after(transfer, partial(self._abort, pages))
            self._abort(list(left))
        _raise_losses([transfer for transfer, _ in transfers])
        return keys

    def _abort(self, pages: list[Page]) -> None:
        self._pool.index.abort(pages)
        for slab in {page.slab for page in pages}:
            if self._pool._slab_is_broken(slab):
                self._pool.index.unformat(slab)
        self._tell(pages)

    def _tell(self, pages: list[Page]) -> None:
        """Wakes those who wait for the same pages."""
        for page in pages:
            self._pool._parking.pop(page.key).set()


def _by_slab(pages: Iterable[Page], blocks: Iterable[int]) -> dict[int, tuple[list[Page], list[int]]]:
    """Returns for each slab its pages and what stands beside them."""
    groups: dict[int, tuple[list[Page], list[int]]] = {}
    for page, block in zip(pages, blocks, strict=True):
        group = groups.setdefault(page.slab, ([], []))
        group[0].append(page)
        group[1].append(block)
    return groups


async def _ended(transfer: Transfer) -> None:
    try:
        await transfer
    except KvxferError:
        pass  # is said by its `error`


async def _all_ended(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        await _ended(transfer)


def _raise_losses(transfers: list[Transfer]) -> None:
    if errors := [transfer.error for transfer in transfers if transfer.error is not None]:
        raise largest_loss(errors)


def _looked_at(task: asyncio.Task[Any]) -> None:
    """Whoever waits for a task has its exception, and nobody need wait."""
    if not task.cancelled():
        task.exception()


def _closed() -> UsageError:
    return UsageError("the page pool is closed: the daemon ends", code="refused")
