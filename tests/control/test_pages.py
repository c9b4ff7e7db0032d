"""Pages that agents park, and that others fetch."""

from __future__ import annotations

import asyncio
import math
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvxfer import (
    Agent,
    AgentOptions,
    KVLayout,
    KvxferError,
    LeaseToken,
    RegionDescriptor,
    TransferError,
    UsageError,
)
from kvxfer.control.own_agent import OwnAgent, RemotePlace
from kvxfer.control.page_index import PageKey
from kvxfer.control.page_layout import page_nbytes
from kvxfer.control.page_pool import Parked, Salt
from kvxfer.errors import ExhaustedError, PeerError
from tests.control.engines import BOUND_S, SALT, SHAPE, Attached, Daemon, Engine, options, until
from tests.fault.node import Worker

LARGE = (8, 2, 64, 32, 4, 128)  # 32 MiB
ROOT = Path(__file__).resolve().parents[2]
MakeEngine = Callable[..., Engine]
MakeDaemon = Callable[..., Daemon]
# Slabs of five pages.
SLAB = 5 * math.prod(SHAPE) // SHAPE[2] * 2
SMALL_SLABS = {"slab_nbytes": SLAB}


def names(count: int, first: int = 0) -> list[str]:
    return [f"k{number}" for number in range(first, first + count)]


def node_pattern(seed: int, count: int) -> NDArray[np.uint64]:
    """What `Node.fill` writes."""
    with np.errstate(over="ignore"):
        return np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15 + 2 * seed)


async def parked(daemon: Daemon, engine: Engine, count: int, first: int = 0, salt: Salt = SALT) -> Parked:
    """Parks blocks of an engine under names of their numbers."""
    lease = engine.region.grant(daemon.own.name, ttl_s=BOUND_S)
    async with lease:
        return await daemon.pool.park(
            salt, engine.place, range(first, first + count), names(count, first), lease=lease.token
        )


# ---- bytes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("axes", ["l2bthd", "bl2htd"])
async def test_what_one_agent_parks_another_fetches(
    engine: MakeEngine, daemon: MakeDaemon, transport: str, axes: str, seed: int
) -> None:
    """Also in another order of axes, and as from another node (tcp alone)."""
    node = daemon(agent_options=options(transport), **SMALL_SLABS)
    first, second = (
        engine("prefill", agent_options=options(transport)),
        engine("decode", axes, agent_options=options(transport)),
    )
    first.fill(seed)
    done = await parked(node, first, 12, first=3)
    assert done == Parked(first.keys(names(12, 3)), [])
    assert node.there == names(12, 3)
    wanted = dict(zip(done.new, first.sums(range(3, 15)), strict=True))
    first.fill(seed + 1)  # the engine goes on with its blocks
    leased = node.pool.lease([*done.new, *first.keys(["none"])], "decode")
    assert leased.missing == first.keys(["none"])
    assert len(leased.parts) == 3
    found: dict[PageKey, int] = {}
    for part in leased.parts:
        found.update(zip(part.keys, await second.fetch(part), strict=True))
    assert found == wanted
    assert await node.pool.revoke(leased.number)
    assert not await node.pool.revoke(leased.number)


def caches() -> dict[str, tuple[list[tuple[NDArray[Any], int]], Any, KVLayout]]:
    """Caches of every kind: arrays with the axis of their blocks, what is registered, and the layout."""

    def one(shape: tuple[int, ...], axes: str, element: Any = np.uint16, **held: Any) -> Any:
        array = np.zeros(shape, element)
        return [(array, axes.index("b"))], array, KVLayout.from_tensor(array, axes, **held)

    def several(shape: tuple[int, ...], axes: str) -> Any:
        arrays = [np.zeros(shape, np.uint16) for _ in range(3)]
        return [(each, axes.index("b")) for each in arrays], arrays, KVLayout.from_tensors(arrays, axes)

    pairs = [tuple(np.zeros((9, 8, 4, 16), np.uint16) for _ in range(2)) for _ in range(3)]
    stored, scales = np.zeros((3, 2, 9, 8, 4, 16), np.uint8), np.zeros((3, 2, 9, 4), np.float32)
    scaled = KVLayout.from_tensor(stored, "l2bthd", dtype="float8_e4m3fn", scales=scales, scale_axes="l2bh")
    return {
        "latent": one((3, 9, 8, 72), "lbtd"),
        "keys and values in one row": one((3, 9, 8, 4, 32), "lbthc"),
        "states": one((3, 9, 13), "lbd", "V3", dtype="opaque"),
        "of a rank": one((3, 2, 9, 8, 4, 16), "l2bthd", total_heads=8, first_head=4, null_block=0),
        "of context parallelism": one((3, 2, 9, 8, 4, 16), "l2bthd", cp_size=2, cp_rank=1),
        "a tensor for each layer": several((2, 9, 8, 4, 16), "2bthd"),
        "keys and values apart": (
            [(each, 0) for pair in pairs for each in pair],
            pairs,
            KVLayout.from_tensors(pairs, "bthd"),
        ),
        "scales of heads": ([(stored, 2), (scales, 2)], [stored, scales], scaled),
    }


@pytest.mark.parametrize("name", caches())
async def test_pages_of_every_kind_of_cache_come_back_as_they_were(
    daemon: MakeDaemon, name: str, seed: int
) -> None:
    arrays, memory, layout = caches()[name]
    random_bytes = np.random.default_rng(seed)
    for array, _ in arrays:
        # Scales are numbers, and bytes of any other kind are bytes.
        values = random_bytes.integers(1, 100, array.size, np.uint8)
        if array.dtype == np.float32:
            array.reshape(-1)[:] = values
        else:
            raw = array.reshape(-1).view(np.uint8)
            raw[:] = random_bytes.integers(0, 256, raw.size, np.uint8)
    wanted = [np.take(array, range(1, 5), axis).tobytes() for array, axis in arrays]
    node = daemon(slab_nbytes=3 * page_nbytes(layout))
    with Agent("engine", options()) as agent:
        region = agent.register("kv", memory, layout)
        lease = region.grant(node.own.name, ttl_s=BOUND_S)
        place = RemotePlace("engine", "kv", agent.address)
        done = await node.pool.park(SALT, place, range(1, 5), names(4), lease=lease.token)
        for part in node.pool.lease(done.new, "engine").parts:
            into = [5 + int(key.key[1:]) for key in part.keys]
            remote = RegionDescriptor.from_bytes(part.region.to_bytes())
            await agent.connect(remote)
            await agent.read(region, remote, part.blocks, into, lease=part.token)
        assert [np.take(array, range(5, 9), axis).tobytes() for array, axis in arrays] == wanted


async def test_a_second_node_fetches_from_the_first_and_keeps_what_it_fetched(
    engine: MakeEngine, daemon: MakeDaemon, seed: int
) -> None:
    one, two = daemon("one"), daemon("two", agent_options=options("tcp"))
    source, reader = engine("prefill"), engine("decode")
    source.fill(seed)
    done = await parked(one, source, 8)
    (part,) = one.pool.lease(done.new, two.own.name).parts
    place = RemotePlace(one.own.name, part.region.name, one.own.address)
    again = await two.pool.park(SALT, place, part.blocks, names(8), lease=part.token)
    assert again.new == done.new
    (part,) = two.pool.lease(again.new).parts
    assert await reader.fetch(part) == source.sums(range(8))


async def test_pages_are_pushed_into_an_agents_region(
    engine: MakeEngine, daemon: MakeDaemon, seed: int
) -> None:
    node = daemon(**SMALL_SLABS)
    source, target = engine("prefill"), engine("decode", "l2bhtd")
    source.fill(seed)
    done = await parked(node, source, 12)
    expected = target.agent.expect(b"request", range(12))
    nbytes = await node.pool.push(done.new[::-1], target.place, range(12), notify=b"request")
    assert nbytes == 12 * source.layout.block_nbytes
    await expected
    assert target.sums(range(12)) == source.sums(range(12))[::-1]
    assert node.pool.stats().pages.num_held == 0
    with pytest.raises(UsageError, match="1 of 2 pages are not parked"):
        await node.pool.push([done.new[0], *source.keys(["none"])], target.place, [0, 1], notify=b"x")
    with pytest.raises(TransferError) as refused:
        await node.pool.push(done.new[:1], target.place, [0], notify=b"other", timeout_s=0.2)
    assert refused.value.code in ("deadline", "not-permitted")  # by whichever end looks first
    assert node.pool.stats().pages.num_held == 0


async def test_an_attached_agent_is_asked_for_the_lease(
    engine: MakeEngine, daemon: MakeDaemon, seed: int
) -> None:
    source = engine("prefill")
    source.fill(seed)
    attached = Attached(source)
    node = daemon(granter=attached)
    done = await node.pool.park(SALT, RemotePlace("prefill", "kv"), range(4), names(4), pin=True)
    (asked,) = attached.agents.values()
    await until(lambda: not asked.leases)  # it is given back behind the answer
    assert node.pool.stats().pages.pinned_nbytes == sum(page.nbytes for page in node.pool.pages())
    again = await node.pool.park(SALT, RemotePlace(asked.incarnation, "kv"), range(5), names(5))
    assert again.present == done.new
    assert len(again.new) == 1


# ---- who sees what ----------------------------------------------------------------------------


async def test_the_same_key_of_another_tenant_is_another_page(
    engine: MakeEngine, daemon: MakeDaemon, seed: int
) -> None:
    node, source = daemon(), engine("prefill")
    theirs = SALT._replace(tenant="other")
    sums = []
    for number, salt in enumerate((SALT, theirs)):
        source.fill(seed + number)
        sums.append(source.sums([0]))
        await parked(node, source, 1, salt=salt)
    reader = engine("decode")
    for salt, wanted in zip((SALT, theirs), sums, strict=True):
        (part,) = node.pool.lease(source.keys(names(1), salt)).parts
        assert await reader.fetch(part) == wanted
    await node.pool.drop(source.keys(names(1), theirs))
    assert [page.key.tenant for page in node.pool.pages()] == ["tenant"]
    assert node.pool.pages("other") == []
    assert list(node.pool.tenants()) == ["tenant"]


async def test_a_lease_lets_its_holder_read_its_blocks_and_nobody_else(
    engine: MakeEngine, daemon: MakeDaemon, seed: int
) -> None:
    node, source = daemon(), engine("prefill")
    done = await parked(node, source, 2)
    (part,) = node.pool.lease(done.new[:1], "decode").parts
    stranger, reader = engine("stranger"), engine("decode")
    with pytest.raises(TransferError) as refused:
        await stranger.fetch(part)
    assert refused.value.code == "not-permitted"
    other_block = part._replace(blocks=[node.pool.find(done.new)[1].block])  # type: ignore[union-attr]
    with pytest.raises(TransferError):
        await reader.fetch(other_block)
    await reader.fetch(part)


async def test_two_that_park_the_same_key_at_once_read_it_once(
    engine: MakeEngine, daemon: MakeDaemon, seed: int
) -> None:
    node, source = daemon(), engine("prefill")
    source.fill(seed)
    lease = source.region.grant(None, ttl_s=BOUND_S)
    both = [
        node.pool.park(SALT, source.place, blocks, [f"k{block}" for block in blocks], lease=lease.token)
        for blocks in (range(4), range(2, 6), range(5))
    ]
    done = await asyncio.gather(*both)
    assert sorted(key.key for each in done for key in each.new) == names(6)
    assert [len(each.new) + len(each.present) for each in done] == [4, 4, 5]


async def test_the_second_parks_what_the_first_could_not(
    engine: MakeEngine, daemon: MakeDaemon, seed: int
) -> None:
    node, source, bad = daemon(), engine("prefill"), engine("bad")
    source.fill(seed)
    await node.own.connect("prefill", source.place.address)
    await node.own.connect("bad", bad.place.address)
    lease = source.region.grant(None, ttl_s=BOUND_S)
    first = asyncio.create_task(node.pool.park(SALT, bad.place, [0], ["k"], lease=LeaseToken.draw()))
    second = asyncio.create_task(node.pool.park(SALT, source.place, [0], ["k"], lease=lease.token))
    with pytest.raises(TransferError):
        await first
    done = await second
    assert done.new == source.keys(["k"])
    assert node.there == ["k"]
    (part,) = node.pool.lease(done.new).parts
    assert await bad.fetch(part) == source.sums([0])


# ---- what fails -------------------------------------------------------------------------------


async def test_a_park_that_fails_half_way_keeps_what_was_read(
    engine: MakeEngine, daemon: MakeDaemon, seed: int
) -> None:
    node, source = daemon(**SMALL_SLABS), engine("prefill")
    source.fill(seed)
    lease = source.region.grant(
        node.own.name, range(7), ttl_s=BOUND_S
    )  # the second slab's are not among them
    with pytest.raises(TransferError) as failed:
        await node.pool.park(SALT, source.place, range(10), names(10), lease=lease.token)
    assert failed.value.code == "not-permitted"
    there = [page.key.key for page in node.pool.pages()]
    assert there == node.there == names(5)
    assert node.pool.stats().pages.used_nbytes == 5 * source.layout.block_nbytes
    (part,) = node.pool.lease(source.keys(there)).parts
    assert await source.fetch(part, range(10, 15)) == source.sums(range(5))


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
        while node.pool._jobs or node.pool._reaping:
            await asyncio.wait(node.pool._jobs | node.pool._reaping)
        assert not node.pool._parking
        assert node.pool.stats().pages.used_nbytes in (0, 60 * source.layout.block_nbytes)
        assert done is None or node.pool.stats().pages.num_pages == 60
        await node.pool.drop(source.keys(names(60)))


async def test_a_slab_that_cannot_be_made_is_made_by_the_next(
    engine: MakeEngine, daemon: MakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, source = daemon(nbytes=SLAB, **SMALL_SLABS), engine("prefill")
    with monkeypatch.context() as patch:

        def refuse(*_: object) -> None:
            raise ExhaustedError("no region more", code="exhausted")

        patch.setattr(node.own, "register", refuse)
        lease = source.region.grant(None, ttl_s=BOUND_S)
        parks = [
            node.pool.park(SALT, source.place, [block], [f"k{block}"], lease=lease.token)
            for block in range(3)
        ]
        assert [type(each) for each in await asyncio.gather(*parks, return_exceptions=True)] == [
            ExhaustedError
        ] * 3
    assert node.pool.stats().pages.num_slabs_used == 0
    assert len((await parked(node, source, 3)).new) == 3


async def test_what_the_store_does_not_take_is_not_acknowledged(
    engine: MakeEngine, daemon: MakeDaemon
) -> None:
    async def full(keys: list[PageKey]) -> None:
        raise OSError(28, "no space left")

    node, source = daemon(on_parked=full), engine("prefill")
    with pytest.raises(OSError, match="no space"):
        await parked(node, source, 3)
    assert node.pool.pages() == []
    assert node.pool.stats().pages.used_nbytes == 0
    assert node.gone == [(name, "dropped") for name in names(3)], "it may have taken some"


async def test_the_source_goes_in_the_middle(engine: MakeEngine, daemon: MakeDaemon) -> None:
    node, source = daemon(), engine("prefill")
    lease = source.region.grant(None, ttl_s=BOUND_S)
    await node.own.connect("prefill", source.place.address)
    park = asyncio.create_task(node.pool.park(SALT, source.place, range(20), names(20), lease=lease.token))
    await asyncio.sleep(0)
    source.agent.close()
    try:
        await park
    except KvxferError:
        assert node.pool.stats().pages.used_nbytes == 0
    assert not node.pool._parking


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_the_source_is_killed_in_the_middle(
    engine: MakeEngine, daemon: MakeDaemon, transport: str, seed: int
) -> None:
    """What is acknowledged is whole; of the rest nothing stays, and the pool goes on."""
    node = daemon(nbytes=1 << 27, slab_nbytes=1 << 24, agent_options=options(transport, silent_timeout_s=3.0))
    source = await asyncio.to_thread(Worker, "prefill", transport, LARGE, silent_timeout_s=3.0)
    try:
        source.fill(seed)
        source.grant("read", None, None)
        token, address = source.token(), source.address()
        place = RemotePlace("prefill", "kv", address)
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
    # Another slab's of a call that failed may have been whole, and stays.
    assert {page.key for page in node.pool.pages()} >= set(there)
    await until(lambda: not node.pool._parking and not node.pool._reaping)
    assert sorted(node.there) == sorted(page.key.key for page in node.pool.pages())
    reader = engine("decode", shape=LARGE, agent_options=options(transport))
    pattern = engine("pattern", shape=LARGE)
    pattern.cache.reshape(-1).view(np.uint64)[:] = node_pattern(seed, pattern.cache.size // 4)
    for part in node.pool.lease([page.key for page in node.pool.pages()]).parts if node.there else ():
        blocks = [int(key.key[1:]) for key in part.keys]
        assert await reader.fetch(part, blocks) == pattern.sums(blocks)


async def test_after_a_restart_what_was_told_as_there_is_told_as_gone_by_none(
    engine: MakeEngine, daemon: MakeDaemon
) -> None:
    """Pages are not durable: a pool begins empty, and its owner compares what it was told."""
    node, source = daemon(), engine("prefill")
    done = await parked(node, source, 3)
    assert node.there == names(3)
    await node.aclose()
    again = daemon()
    assert again.pool.pages() == []
    assert again.pool.find(done.new) == [None] * 3


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"keys": ["a"]}, "invalid-argument"),
        ({"keys": ["a", "a"]}, "invalid-argument"),
        ({"keys": ["", "b"]}, "invalid-argument"),
        ({"blocks": [0, 24]}, "out-of-range"),
        ({"blocks": [], "keys": []}, "invalid-argument"),
        ({"timeout_s": -1.0}, "invalid-argument"),
        ({"timeout_s": math.nan}, "invalid-argument"),
        ({"priority": 256}, "invalid-argument"),
        ({"context": "x" * 257}, "invalid-argument"),
        ({"source": RemotePlace("prefill", "none")}, "unknown-region"),
        ({"source": RemotePlace("nobody", "kv")}, "unreachable"),
        ({"source": RemotePlace("daemon/n", "kv")}, "unsupported"),
        ({"source": RemotePlace("", "kv", "tcp://169.254.169.254:80")}, "not-permitted"),
        ({"source": RemotePlace("", "kv", "tcp://metadata.google.internal:80")}, "not-permitted"),
        ({"source": RemotePlace("", "kv", "http://127.0.0.1:80")}, "invalid-argument"),
        ({"source": RemotePlace("", "kv", "tcp://127.0.0.1")}, "invalid-argument"),
    ],
    ids=str,
)
async def test_what_is_wrong_with_a_request_is_said(
    engine: MakeEngine, daemon: MakeDaemon, change: dict[str, object], code: str
) -> None:
    node, source = daemon(), engine("prefill")
    await node.own.connect("prefill", source.place.address)
    asked = {"salt": SALT, "source": source.place, "blocks": [0, 1], "keys": ["a", "b"], **change}
    with pytest.raises(KvxferError) as refused:
        await node.pool.park(**asked)  # type: ignore[arg-type]
    assert refused.value.code == code
    assert node.pool.stats().pages.used_nbytes == 0
    assert not node.pool._parking


# ---- what gives way ---------------------------------------------------------------------------


async def test_pages_give_way_by_age_and_those_that_are_leased_do_not(
    engine: MakeEngine, daemon: MakeDaemon, seed: int
) -> None:
    node, source, reader = daemon(nbytes=SLAB, **SMALL_SLABS), engine("prefill"), engine("decode")
    source.fill(seed)
    done = await parked(node, source, 5)
    leased = node.pool.lease(done.new[:2])
    await parked(node, source, 3, first=5)
    assert node.gone == [(name, "evicted") for name in ("k2", "k3", "k4")]
    with pytest.raises(ExhaustedError):
        await parked(node, source, 4, first=8)
    (part,) = leased.parts
    assert await reader.fetch(part) == source.sums(range(2))
    await node.pool.revoke(leased.number)
    await parked(node, source, 4, first=8)
    assert len(node.pool.pages()) == 5


async def test_slabs_go_from_one_layout_to_another(engine: MakeEngine, daemon: MakeDaemon, seed: int) -> None:
    node = daemon(nbytes=2 * SLAB, **SMALL_SLABS)
    one, two = engine("one"), engine("two", shape=(5, 2, 24, 8, 4, 32))
    one.fill(seed)
    two.fill(seed + 1)
    for round_ in range(4):
        source, count = (one, 10) if round_ % 2 else (two, 6)
        done = await parked(node, source, count)
        for part in node.pool.lease(done.new).parts:
            at = [int(key.key[1:]) for key in part.keys]
            assert await source.fetch(part, range(12, 12 + len(at))) == source.sums(at)
        for number in list(node.pool.leases):
            await node.pool.revoke(number)
    assert len(node.own.agent.regions) == 2
    await node.pool.drop([page.key for page in node.pool.pages()])
    assert node.pool.stats().pages.used_nbytes == 0


async def test_parks_leases_and_drops_at_once_never_show_other_bytes(
    engine: MakeEngine, daemon: MakeDaemon, seed: int
) -> None:
    """Eviction races with fetches: what a lease covers is what was parked under the key."""
    node = daemon(nbytes=3 * SLAB, **SMALL_SLABS)
    source, readers = engine("prefill"), [engine(f"reader-{number}") for number in range(3)]
    source.fill(seed)
    sums = dict(zip(names(24), source.sums(range(24)), strict=True))
    grant = source.region.grant(None, ttl_s=60.0)
    chance = random.Random(seed)
    fetched = 0
    codes: set[str] = set()
    parking = 2

    async def parks() -> None:
        nonlocal parking
        for _ in range(40):
            blocks = chance.sample(range(24), 4)
            try:
                await node.pool.park(
                    SALT, source.place, blocks, [f"k{block}" for block in blocks], lease=grant.token
                )
            except ExhaustedError:
                await asyncio.sleep(0.001)
        parking -= 1

    async def fetches(reader: Engine) -> None:
        nonlocal fetched
        while parking:
            leased = node.pool.lease(source.keys(chance.sample(names(24), 3)), reader.agent.name)
            for part in leased.parts:
                try:
                    found = await reader.fetch(part)
                except TransferError as error:
                    codes.add(error.code)
                    continue
                assert found == [sums[key.key] for key in part.keys]
                fetched += len(found)
            await node.pool.revoke(leased.number)
            await asyncio.sleep(0)

    async def drops() -> None:
        for _ in range(20):
            await node.pool.drop(source.keys(chance.sample(names(24), 2)), revoke=chance.random() < 0.5)
            await asyncio.sleep(0.001)

    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(parks(), parks(), drops(), *map(fetches, readers))
    assert fetched
    assert codes <= {"lease-ended", "not-permitted"}
    assert node.pool.stats().pages.num_held == 0
    assert not node.pool._parking


async def test_drop_is_a_fence(engine: MakeEngine, daemon: MakeDaemon) -> None:
    node, source, reader = daemon(), engine("prefill"), engine("decode")
    done = await parked(node, source, 4)
    (part,) = node.pool.lease(done.new[:2], "decode").parts
    kept = node.pool.lease(done.new[3:], "decode", 0.2)
    assert await node.pool.drop(done.new[:1]) == done.new[:1]
    with pytest.raises(TransferError) as ended:
        await reader.fetch(part)
    assert ended.value.code in ("lease-ended", "not-permitted")
    assert await node.pool.drop(done.new[3:], revoke=False) == done.new[3:]
    assert kept.number not in node.pool.leases, "it was waited for"
    assert [page.key for page in node.pool.pages()] == done.new[1:3]
    assert node.gone == [("k0", "dropped"), ("k3", "dropped")]


# ---- leases -----------------------------------------------------------------------------------


async def test_a_lease_ends_by_its_time_and_is_extended(engine: MakeEngine, daemon: MakeDaemon) -> None:
    node, source, reader = daemon(), engine("prefill"), engine("decode")
    done = await parked(node, source, 2)
    leased = node.pool.lease(done.new, "decode", 0.05)
    before = leased.expires_at
    assert node.pool.extend(leased.number, 0.3).expires_at > before
    await reader.fetch(leased.parts[0])
    await leased._ended.wait()
    assert not node.pool.leases
    assert node.pool.stats().pages.num_held == 0
    with pytest.raises(UsageError, match="has ended"):
        node.pool.extend(leased.number, 1.0)
    with pytest.raises(TransferError):
        await reader.fetch(leased.parts[0])


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf"), 1e6])
async def test_a_lease_of_no_time_is_refused_and_holds_nothing(
    engine: MakeEngine, daemon: MakeDaemon, ttl_s: float
) -> None:
    node, source = daemon(), engine("prefill")
    done = await parked(node, source, 2)
    with pytest.raises(UsageError):
        node.pool.lease(done.new, None, ttl_s)
    assert node.pool.stats().pages.num_held == 0
    assert not node.pool.leases


async def test_a_reader_that_is_killed_gives_its_pages_back_with_its_leases_time(
    engine: MakeEngine, daemon: MakeDaemon, seed: int
) -> None:
    node, source = daemon(nbytes=SLAB, **SMALL_SLABS), engine("prefill")
    source.fill(seed)
    done = await parked(node, source, 5)
    leased = node.pool.lease(done.new, "reader", 60.0)
    (part,) = leased.parts
    reader = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.control.page_reader", "reader", str(part.token)),
        *(part.region.to_bytes().decode(), ",".join(map(str, part.blocks))),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    assert reader.stdout is not None
    try:
        line = await asyncio.wait_for(reader.stdout.readline(), BOUND_S)
        assert [int(each) for each in line.split()] == source.sums(range(5))
    finally:
        reader.kill()
        await reader.communicate()
    with pytest.raises(ExhaustedError):  # it might yet be reading
        await parked(node, source, 1, first=5)
    node.pool.extend(leased.number, 0.05)
    await asyncio.wait_for(leased._ended.wait(), BOUND_S)
    assert len((await parked(node, source, 5, first=5)).new) == 5


async def test_what_ends_with_the_pool(engine: MakeEngine, daemon: MakeDaemon) -> None:
    node, source = daemon(), engine("prefill")
    lease = source.region.grant(None, ttl_s=BOUND_S)
    await node.own.connect("prefill", source.place.address)
    done = await parked(node, source, 2)
    node.pool.lease(done.new)
    # Of a lease that was never granted it waits until its deadline.
    waits = asyncio.create_task(node.pool.push(done.new, source.place, [0, 1], notify=b"none"))
    parks = asyncio.create_task(node.pool.park(SALT, source.place, range(9), names(9, 5), lease=lease.token))
    await asyncio.sleep(0.01)
    await node.pool.aclose()
    with pytest.raises(UsageError, match="closed"):
        await waits
    await asyncio.wait([parks])
    parks.exception()
    with pytest.raises(UsageError, match="closed"):
        node.pool.lease(done.new)
    assert not node.own.agent.regions
    assert not node.own.leases
    await node.pool.aclose()


async def test_agents_of_two_nodes_with_other_models_meet(engine: MakeEngine, daemon: MakeDaemon) -> None:
    """Slabs of both are numbered alike; two agents refuse each other over unlike regions of one name."""
    one, two = daemon("one"), daemon("two")
    await parked(one, engine("a"), 1)
    await parked(two, engine("b", shape=(3, 2, 24, 8, 4, 64)), 1)
    assert (await one.own.connect(two.own.name, two.own.address)).name == two.own.name


async def test_a_daemons_name_and_address_must_agree(daemon: MakeDaemon) -> None:
    one, two = daemon("one"), daemon("two")
    with pytest.raises(PeerError) as other:
        await one.own.connect("daemon/three", two.own.address)
    assert other.value.code == "peer-restarted"
    first, second = await asyncio.gather(*(one.own.connect("", two.own.address) for _ in range(2)))
    assert first is second is await one.own.connect("daemon/two")


async def test_few_of_a_host_are_dialled_at_a_time(daemon: MakeDaemon) -> None:
    import socket

    node = daemon(agent_options=replace(options(), connect_timeout_s=1.0))
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        port = silent.getsockname()[1]
        dials = [
            asyncio.create_task(node.own.connect("", f"tcp://127.0.0.{number}:{port}"))
            for number in range(1, 3)
        ]
        more = [
            asyncio.create_task(node.own.connect("", f"tcp://127.0.0.3:{port + number % 3}"))
            for number in range(20)
        ]
        await asyncio.gather(*dials, *more, return_exceptions=True)
    assert not node.own._dials._under_way
    assert not node.own._dials._of_host


@pytest.mark.parametrize("node", ["", "x" * 49, "a\nb"])
def test_a_node_has_a_name(node: str) -> None:
    with pytest.raises(UsageError):
        OwnAgent(node, AgentOptions())
