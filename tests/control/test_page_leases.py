"""Which pages are evicted, which are not, and how long a reader keeps them."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from pathlib import Path

import pytest

from kvxfer import TransferError
from kvxfer.control.host_pool.page_leases import LeasedPages
from kvxfer.errors import ExhaustedError
from tests.control.engines import (
    BOUND_S,
    SALT,
    SHAPE,
    SLAB,
    SMALL_SLABS,
    Daemon,
    Engine,
    MakeDaemon,
    MakeEngine,
    names,
    options,
    parked,
)

ROOT = Path(__file__).resolve().parents[2]


async def test_pages_give_way_by_age_and_those_that_are_leased_do_not(
    source: Engine, engine: MakeEngine, daemon: MakeDaemon, seed: int
) -> None:
    node, reader = daemon(nbytes=SLAB, **SMALL_SLABS), engine("decode")
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


async def test_parks_leases_and_drops_at_once_never_show_other_bytes(
    engine: MakeEngine, daemon: MakeDaemon, seed: int
) -> None:
    """While eviction races with fetches and slabs change their layout, a lease covers what was parked."""
    node = daemon(nbytes=3 * SLAB, **SMALL_SLABS)
    shapes = SHAPE, (5, *SHAPE[1:])
    sources = [engine(f"prefill-{number}", shape=shape) for number, shape in enumerate(shapes)]
    sums = []
    for number, source in enumerate(sources):
        source.fill(seed + number)
        sums.append(dict(zip(names(24), source.sums(range(24)), strict=True)))
    grants = [source.region.grant(None, ttl_s=60.0) for source in sources]
    chance = random.Random(seed)
    fetched = [0, 0]
    codes: set[str] = set()
    parking = 2

    async def parks(which: int) -> None:
        nonlocal parking
        for _ in range(40):
            blocks = chance.sample(range(24), 4)
            keys = [f"k{block}" for block in blocks]
            try:
                await node.pool.park(SALT, sources[which].place, blocks, keys, lease=grants[which].token)
            except ExhaustedError:
                await asyncio.sleep(0.001)
        parking -= 1

    async def fetches(which: int, reader: Engine) -> None:
        while parking:
            leased = node.pool.lease(reader.keys(chance.sample(names(24), 3)), reader.agent.name)
            for _ in range(chance.randrange(60)):  # others need its slots meanwhile
                await asyncio.sleep(0)
            for part in leased.parts:
                try:
                    found = await reader.fetch(part)
                except TransferError as error:
                    codes.add(error.code)
                    continue
                assert found == [sums[which][key.key] for key in part.keys]
                fetched[which] += len(found)
            await node.pool.revoke(leased.number)
            await asyncio.sleep(0)

    async def drops() -> None:
        for _ in range(20):
            keys = chance.choice(sources).keys(chance.sample(names(24), 2))
            await node.pool.drop(keys, revoke=chance.random() < 0.5)
            await asyncio.sleep(0.001)

    readers = [
        fetches(which, engine(f"reader-{which}-{number}", shape=shape))
        for which, shape in enumerate(shapes)
        for number in range(2)
    ]
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(parks(0), parks(1), drops(), *readers)
    assert all(fetched)
    assert codes <= {"lease-ended", "not-permitted"}
    assert node.pool.stats().pages.num_held == 0
    assert not node.pool.stats().num_parking
    assert len(node.own.agent.regions) <= 2


async def test_drop_is_a_fence(source: Engine, node: Daemon, engine: MakeEngine) -> None:
    reader = engine("decode")
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


async def test_a_lease_ends_by_its_time_and_is_extended(
    source: Engine, node: Daemon, engine: MakeEngine
) -> None:
    reader = engine("decode")
    done = await parked(node, source, 2)
    leased = node.pool.lease(done.new, "decode", 0.05)
    before = leased.expires_at
    assert node.pool.extend(leased.number, 0.3).expires_at > before
    await reader.fetch(leased.parts[0])
    await leased.ended.wait()
    assert not node.pool.leases
    assert node.pool.stats().pages.num_held == 0
    with pytest.raises(TransferError, match="has ended"):
        node.pool.extend(leased.number, 1.0)
    with pytest.raises(TransferError):
        await reader.fetch(leased.parts[0])


async def test_a_reader_that_is_killed_gives_its_pages_back_with_its_leases_time(
    source: Engine, daemon: MakeDaemon, seed: int
) -> None:
    node = daemon(nbytes=SLAB, **SMALL_SLABS)
    source.fill(seed)
    done = await parked(node, source, 5)
    leased = node.pool.lease(done.new, "reader", 60.0)
    reader, line = await reading(leased.parts[0])
    reader.kill()
    await reader.communicate()
    assert [int(each) for each in line.split()] == source.sums(range(5))
    with pytest.raises(ExhaustedError):  # it might yet be reading
        await parked(node, source, 1, first=5)
    node.pool.extend(leased.number, 0.05)
    await asyncio.wait_for(leased.ended.wait(), BOUND_S)
    assert len((await parked(node, source, 5, first=5)).new) == 5


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_reader_that_stands_still_is_fenced_and_never_shows_other_pages(
    engine: MakeEngine, daemon: MakeDaemon, transport: str, seed: int
) -> None:
    """Its pages are dropped, and other pages take their slots before it resumes."""
    node = daemon(nbytes=SLAB, agent_options=options(transport), **SMALL_SLABS)
    source = engine("prefill", agent_options=options(transport))
    source.fill(seed)
    done = await parked(node, source, 5)
    (part,) = node.pool.lease(done.new, "reader", 60.0).parts
    reader, first = await reading(part, transport)
    try:
        await asyncio.sleep(random.Random(seed).random() * 0.01)
        reader.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(BOUND_S):
            assert await node.pool.drop(done.new) == done.new
        assert len((await parked(node, source, 5, first=5)).new) == 5
        reader.send_signal(signal.SIGCONT)
        lines, errors = await asyncio.wait_for(reader.communicate(), BOUND_S)
    finally:
        if reader.returncode is None:
            reader.kill()
            await reader.communicate()
    wanted = source.sums(range(5))
    assert all([int(each) for each in line.split()] == wanted for line in [first, *lines.splitlines()])
    assert b"[lease-ended" in errors or b"[not-permitted" in errors


async def reading(part: LeasedPages, transport: str = "") -> tuple[asyncio.subprocess.Process, bytes]:
    """Starts a process that reads leased pages again and again; returns it and its first line."""
    reader = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.control.page_reader", "reader", str(part.token)),
        *(part.region.to_bytes().decode(), ",".join(map(str, part.blocks)), transport),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert reader.stdout is not None
    return reader, await asyncio.wait_for(reader.stdout.readline(), BOUND_S)
