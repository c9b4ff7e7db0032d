"""Parking that fails, is abandoned, or conflicts with another call; and closing the pool."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvxfer import KvxferError, LeaseToken, Region, TransferError
from kvxfer.control.host_pool.page import PageKey
from kvxfer.control.host_pool.page_pool import Parked
from kvxfer.control.own.own_agent import RemoteRegion
from kvxfer.errors import ExhaustedError, PeerError
from tests.control.engines import (
    BOUND_S,
    LARGE,
    SALT,
    SLAB,
    SMALL_SLABS,
    Attached,
    Daemon,
    Engine,
    MakeDaemon,
    MakeEngine,
    names,
    options,
    parked,
)
from tests.fault.node import Worker
from tests.waiting import until_on_loop


def node_pattern(seed: int, count: int) -> NDArray[np.uint64]:
    """Returns what `Node.fill` writes."""
    with np.errstate(over="ignore"):
        return np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15 + 2 * seed)


async def test_a_park_that_is_cancelled_leaves_its_pages_to_the_next(
    source: Engine, node: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = made_slowly(node, monkeypatch)
    lease = source.region.grant(None, ttl_s=BOUND_S)
    first, second = (
        asyncio.create_task(node.pool.park(SALT, source.place, blocks, names(2), lease=lease.token))
        for blocks in [[0, 1]] * 2
    )
    await begun.wait()
    for _ in range(50):  # the second finds that the first is under way
        await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    go_on.set()
    assert (await second).new == source.keys(names(2))


def made_slowly(node: Daemon, monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, threading.Event]:
    """Delays the making of a pool's regions until the second event is set; the first reports a request."""
    begun, go_on, register = asyncio.Event(), threading.Event(), node.own.register
    loop = asyncio.get_running_loop()

    def slow(*what: Any) -> Region:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait(BOUND_S)
        return register(*what)

    monkeypatch.setattr(node.own, "register", slow)
    return begun, go_on


class SlowStore:
    """Stores the keys of pages when it is told to."""

    def __init__(self) -> None:
        self.asked, self.go_on = asyncio.Event(), asyncio.Event()
        self.go_on.set()

    async def __call__(self, keys: list[PageKey]) -> None:
        self.asked.set()
        await self.go_on.wait()


async def test_what_may_not_be_pinned_evicts_nothing(source: Engine, daemon: MakeDaemon) -> None:
    """New pages, pages that are there, and pages that another call is parking count alike."""
    store = SlowStore()
    page_nbytes = source.layout.block_nbytes
    node = daemon(nbytes=SLAB, slab_nbytes=SLAB, max_pinned_nbytes=2 * page_nbytes, on_parked=store)
    lease = source.region.grant(None, ttl_s=BOUND_S)

    def park(first: int, count: int, *, pin: bool = False) -> Any:
        blocks = range(first, first + count)
        return node.pool.park(SALT, source.place, blocks, names(count, first), lease=lease.token, pin=pin)

    await park(0, 4)
    store.asked.clear()
    store.go_on.clear()
    other = asyncio.create_task(park(4, 1, pin=True))
    await store.asked.wait()
    for first, count in ((5, 3), (0, 2), (3, 3), (2, 3)):
        with pytest.raises(ExhaustedError, match="pinned"):
            await park(first, count, pin=True)
    store.go_on.set()
    await other
    assert node.gone == []
    assert [page.key.key for page in node.pool.pages()] == names(5)
    assert node.pool.stats().pages.pinned_nbytes == page_nbytes
    await park(3, 2, pin=True)
    await park(3, 1, pin=True)
    assert node.pool.stats().pages.pinned_nbytes == 2 * page_nbytes
    assert node.pool.pin([page.key for page in node.pool.pages()], False)
    assert node.pool.stats().pages.pinned_nbytes == 0
    await park(5, 2, pin=True)
    assert node.pool.stats().pages.num_held == 0


async def test_a_failed_park_gives_back_what_it_would_have_pinned(source: Engine, daemon: MakeDaemon) -> None:
    page_nbytes = source.layout.block_nbytes
    node = daemon(nbytes=SLAB, slab_nbytes=SLAB, max_pinned_nbytes=2 * page_nbytes)
    await parked(node, source, 1)
    for _ in range(3):
        with pytest.raises(TransferError):
            await node.pool.park(
                SALT, source.place, [0, 1], names(2), lease=LeaseToken.draw(), pin=True, timeout_s=BOUND_S
            )
    assert node.pool.stats().pages.pinned_nbytes == 0
    lease = source.region.grant(None, ttl_s=BOUND_S)
    await node.pool.park(SALT, source.place, [0, 1], names(2), lease=lease.token, pin=True)
    assert node.pool.stats().pages.pinned_nbytes == 2 * page_nbytes


async def test_a_page_that_is_there_stays_while_its_caller_waits(source: Engine, daemon: MakeDaemon) -> None:
    store = SlowStore()
    node = daemon(nbytes=SLAB, slab_nbytes=SLAB, on_parked=store)  # five pages
    await parked(node, source, 1)
    store.asked.clear()
    store.go_on.clear()
    waiting = asyncio.create_task(parked(node, source, 2))
    await store.asked.wait()
    with pytest.raises(ExhaustedError, match="do not fit"):
        await parked(node, source, 4, first=5)
    store.go_on.set()
    done = await waiting
    assert (done.present, done.new) == (source.keys(names(1)), source.keys(names(1, 1)))
    assert all(node.pool.find([*done.present, *done.new]))
    assert len((await parked(node, source, 4, first=5)).new) == 4


async def test_a_call_that_waits_for_anothers_pages_ends_by_its_own_time(
    source: Engine, node: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = made_slowly(node, monkeypatch)
    first = asyncio.create_task(parked(node, source, 2))
    await begun.wait()
    for blocks in ([0, 1], [0, 2]):  # what the other call parks, and a page of its own that waits as well
        with pytest.raises(TransferError, match="were over before") as late:
            await node.pool.park(
                SALT, source.place, blocks, [f"k{block}" for block in blocks], timeout_s=0.05
            )
        assert late.value.code == "deadline"
    go_on.set()
    assert (await first).new == source.keys(names(2))
    assert node.there == names(2)


async def test_a_park_that_fails_keeps_nothing_of_what_it_read(source: Engine, daemon: MakeDaemon) -> None:
    node = daemon(**SMALL_SLABS)
    lease = source.region.grant(node.own.name, range(7), ttl_s=BOUND_S)  # of ten
    there = await parked(node, source, 1)
    with pytest.raises(TransferError) as failed:
        await node.pool.park(SALT, source.place, range(10), names(10), lease=lease.token)
    assert failed.value.code == "not-permitted"
    assert [page.key for page in node.pool.pages()] == there.new
    assert node.there == names(1)
    assert node.pool.stats().pages.used_nbytes == source.layout.block_nbytes
    assert (await parked(node, source, 10)).present == there.new


async def test_a_park_that_is_cancelled_gives_all_places_back(
    engine: MakeEngine, daemon: MakeDaemon, seed: int
) -> None:
    node, source = daemon(), engine("prefill", shape=(8, 2, 64, 64, 4, 128))
    node = daemon("large", nbytes=1 << 26, slab_nbytes=1 << 24)
    lease = source.region.grant(None, ttl_s=BOUND_S)
    chance = random.Random(seed)
    for _ in range(10):
        park = asyncio.create_task(
            node.pool.park(SALT, source.place, range(60), names(60), lease=lease.token)
        )
        for _ in range(chance.randrange(30)):
            await asyncio.sleep(0)
        park.cancel()
        try:
            done = await park
        except asyncio.CancelledError:
            done = None
        while await node.pool._jobs.one_ended():
            pass
        assert not node.pool.stats().num_parking
        assert node.pool.stats().pages.used_nbytes in (0, 60 * source.layout.block_nbytes)
        assert done is None or node.pool.stats().pages.num_pages == 60
        await node.pool.drop(source.keys(names(60)))


@pytest.mark.parametrize(
    ("verb", "error"),
    [("register", ExhaustedError("no region more", code="exhausted")), ("keep", MemoryError())],
    ids=["no region can be made", "an error when the places were given"],
)
async def test_what_cannot_be_parked_gives_its_places_to_the_next(
    source: Engine, daemon: MakeDaemon, monkeypatch: pytest.MonkeyPatch, verb: str, error: Exception
) -> None:
    node = daemon(nbytes=SLAB, **SMALL_SLABS)
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise error

        patch.setattr(node.own if verb == "register" else node.pool._regions, verb, fail)
        lease = source.region.grant(None, ttl_s=BOUND_S)
        parks = [
            node.pool.park(SALT, source.place, [block], [f"k{block}"], lease=lease.token)
            for block in range(3)
        ]
        ended = await asyncio.gather(*parks, return_exceptions=True)
        assert [type(each) for each in ended] == [type(error)] * 3
    assert node.pool.stats().pages.used_nbytes == 0
    assert len((await parked(node, source, 3)).new) == 3


async def test_what_the_store_does_not_take_is_not_acknowledged(source: Engine, daemon: MakeDaemon) -> None:
    async def full(keys: list[PageKey]) -> None:
        raise OSError(28, "no space left")

    node = daemon(on_parked=full)
    with pytest.raises(OSError, match="no space"):
        await parked(node, source, 3)
    assert node.pool.pages() == []
    assert node.pool.stats().pages.used_nbytes == 0
    assert node.gone == [(name, "dropped") for name in names(3)], "it may have taken some"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_the_source_is_killed_in_the_middle(
    engine: MakeEngine, daemon: MakeDaemon, transport: str, seed: int
) -> None:
    """Acknowledged pages are complete, nothing stays of the others, and the pool still works."""
    node = daemon(nbytes=1 << 27, slab_nbytes=1 << 24, agent_options=options(transport, silent_timeout_s=3.0))
    source = await asyncio.to_thread(Worker, "prefill", transport, LARGE, silent_timeout_s=3.0)
    try:
        source.fill(seed)
        source.grant("read", None, None)
        token, address = source.token(), source.address()
        place = RemoteRegion("prefill", "kv", address)
        await node.own.connect("prefill", address)
        parks = [
            asyncio.create_task(
                node.pool.park(SALT, place, range(first, first + 16), names(16, first), lease=token)
            )
            for first in range(0, 64, 16)
        ]
        await asyncio.sleep(random.Random(seed).random() * 0.05)
        await asyncio.to_thread(source.kill)
        done = await asyncio.wait_for(asyncio.gather(*parks, return_exceptions=True), BOUND_S)
    finally:
        source.finish()
    assert all(isinstance(each, Parked | KvxferError) for each in done), done
    there = [key for each in done if isinstance(each, Parked) for key in each.new]
    assert {page.key for page in node.pool.pages()} == set(there)
    await until_on_loop(lambda: not node.pool.stats().num_parking)
    assert sorted(node.there) == sorted(page.key.key for page in node.pool.pages())
    reader = engine("decode", shape=LARGE, agent_options=options(transport))
    pattern = engine("pattern", shape=LARGE)
    pattern.cache.reshape(-1).view(np.uint64)[:] = node_pattern(seed, pattern.cache.size // 4)
    for part in node.pool.lease([page.key for page in node.pool.pages()]).parts if node.there else ():
        blocks = [int(key.key[1:]) for key in part.keys]
        assert await reader.fetch(part, blocks) == pattern.sums(blocks)


async def test_a_source_that_stands_still_costs_its_call_alone(
    engine: MakeEngine, daemon: MakeDaemon, seed: int
) -> None:
    """The read ends by its deadline, its slots serve others, and no late byte arrives there."""
    node = daemon(nbytes=1 << 25, slab_nbytes=1 << 22, agent_options=options("tcp"))
    other, reader = engine("other", shape=LARGE), engine("decode", shape=LARGE)
    other.fill(seed)
    source = await asyncio.to_thread(Worker, "prefill", "tcp", LARGE)
    try:
        source.grant("read", None, None)
        token, place = source.token(), RemoteRegion("prefill", "kv", source.address())
        await node.own.connect("prefill", place.address)
        park = asyncio.create_task(
            node.pool.park(SALT, place, range(64), names(64), lease=token, timeout_s=0.5)
        )
        await asyncio.sleep(random.Random(seed).random() * 0.02)
        await asyncio.to_thread(source.stop)
        await asyncio.wait([park])
        assert park.exception() is None or isinstance(park.exception(), KvxferError)
        await until_on_loop(lambda: not node.pool.stats().num_parking)
        await node.pool.drop(other.keys(names(64)))
        done = await parked(node, other, 64)  # all of the pool
        await asyncio.to_thread(source.resume)
        again = await node.own.remote_region(place)
        like = engine("like", shape=LARGE)
        node.own.register("like", like.cache, like.layout)
        await node.own.read("like", again, range(64), range(64), lease=token, timeout_s=BOUND_S)
    finally:
        source.finish()
    (part,) = node.pool.lease(done.new).parts
    assert await reader.fetch(part, [int(key.key[1:]) for key in part.keys]) == other.sums(range(64))


@pytest.mark.parametrize("verb", ["grant.grant", "grant.revoke"])
async def test_an_attached_agent_that_goes_while_it_is_asked(
    source: Engine, daemon: MakeDaemon, verb: str
) -> None:
    attached = Attached(source, deaf_to=verb)
    node = daemon(granter=attached)
    park = node.pool.park(SALT, RemoteRegion("prefill", "kv"), range(4), names(4))
    if verb == "grant.grant":
        with pytest.raises(PeerError, match="it is gone"):
            await park
        assert node.pool.stats().pages.used_nbytes == 0
    else:
        assert (await park).new == source.keys(names(4)), "the lease ends by its time"
    assert not node.pool.stats().num_parking


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"keys": ["a"]}, "invalid-argument"),
        ({"keys": ["a", "a"]}, "invalid-argument"),
        ({"keys": ["", "b"]}, "invalid-argument"),
        ({"blocks": [0, 24]}, "out-of-range"),
        ({"timeout_s": -1.0}, "invalid-argument"),
        ({"priority": 256}, "invalid-argument"),
        ({"context": "x" * 257}, "invalid-argument"),
        ({"source": RemoteRegion("prefill", "none")}, "unknown-region"),
        ({"source": RemoteRegion("nobody", "kv")}, "invalid-argument"),
        ({"source": RemoteRegion("daemon/n", "kv")}, "unsupported"),
        ({"source": RemoteRegion("", "kv", "tcp://169.254.169.254:80")}, "not-permitted"),
        ({"source": RemoteRegion("", "kv", "tcp://127.0.0.1")}, "invalid-argument"),
    ],
    ids=str,
)
async def test_what_is_wrong_with_a_request_is_said(
    source: Engine, node: Daemon, change: dict[str, object], code: str
) -> None:
    await node.own.connect("prefill", source.place.address)
    asked = {"salt": SALT, "source": source.place, "blocks": [0, 1], "keys": ["a", "b"], **change}
    with pytest.raises(KvxferError) as refused:
        await node.pool.park(**asked)  # type: ignore[arg-type]
    assert refused.value.code == code
    assert node.pool.stats().pages.used_nbytes == 0
    assert not node.pool.stats().num_parking


async def test_what_ends_with_the_pool(source: Engine, node: Daemon) -> None:
    lease = source.region.grant(None, ttl_s=BOUND_S)
    await node.own.connect("prefill", source.place.address)
    done = await parked(node, source, 2)
    node.pool.lease(done.new)
    # For a lease that was never granted, it waits until its deadline.
    waits = asyncio.create_task(node.pool.push(done.new, source.place, [0, 1], notify=b"none"))
    parks = asyncio.create_task(node.pool.park(SALT, source.place, range(9), names(9, 5), lease=lease.token))
    await asyncio.sleep(0.01)
    await node.pool.aclose()
    with pytest.raises(TransferError, match="closed"):
        await waits
    await asyncio.wait([parks])
    parks.exception()
    with pytest.raises(TransferError, match="closed"):
        node.pool.lease(done.new)
    assert not node.own.agent.regions
    assert not node.own.leases
    await node.pool.aclose()


async def test_the_pools_end_waits_for_a_region_that_is_being_made(
    source: Engine, node: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device may be pinning the memory."""
    begun, go_on = made_slowly(node, monkeypatch)
    parks = asyncio.create_task(parked(node, source, 1))
    await begun.wait()
    closing = asyncio.create_task(node.pool.aclose())
    with pytest.raises(TransferError, match="closed"):
        await parks
    await asyncio.sleep(0.05)
    assert not closing.done()
    go_on.set()
    await closing
    assert not node.own.agent.regions
