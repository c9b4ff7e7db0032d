"""Pages that agents park and others fetch."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvxfer import Agent, KVLayout, LeaseToken, RegionDescriptor, TransferError
from kvxfer.control.host_pool.page_layout import page_nbytes
from kvxfer.control.host_pool.page_pool import Parked
from kvxfer.control.own.own_agent import RemoteRegion
from tests.control.engines import (
    BOUND_S,
    SALT,
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
from tests.waiting import until_on_loop


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("axes", ["l2bthd", "bl2htd"])
async def test_what_one_agent_parks_another_fetches(
    engine: MakeEngine, daemon: MakeDaemon, transport: str, axes: str, seed: int
) -> None:
    """Also with another order of axes, and as from another node (only tcp)."""
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
    first.fill(seed + 1)  # the engine reuses its blocks
    leased = node.pool.lease([*done.new, *first.keys(["none"])], "decode")
    assert leased.missing == first.keys(["none"])
    assert len({page.slab for page in node.pool.pages()}) == 3
    (part,) = leased.parts
    assert dict(zip(part.keys, await second.fetch(part), strict=True)) == wanted
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
    node = daemon(slab_nbytes=2 * page_nbytes(layout) + 128)  # pages lie further apart than necessary
    with Agent("engine", options()) as agent:
        region = agent.register("kv", memory, layout)
        lease = region.grant(node.own.name, ttl_s=BOUND_S)
        place = RemoteRegion("engine", "kv", agent.address)
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
    place = RemoteRegion(one.own.name, part.region.name, one.own.address)
    again = await two.pool.park(SALT, place, part.blocks, names(8), lease=part.token)
    assert again.new == done.new
    (part,) = two.pool.lease(again.new).parts
    assert await reader.fetch(part) == source.sums(range(8))


async def test_an_attached_agent_is_asked_for_the_lease(
    source: Engine, daemon: MakeDaemon, seed: int
) -> None:
    source.fill(seed)
    attached = Attached(source)
    node = daemon(granter=attached)
    done = await node.pool.park(SALT, RemoteRegion("prefill", "kv"), range(4), names(4), pin=True)
    (asked,) = attached.agents.values()
    await until_on_loop(lambda: not asked.leases)  # it is given back after the answer
    assert node.pool.stats().pages.pinned_nbytes == sum(page.nbytes for page in node.pool.pages())
    again = await node.pool.park(SALT, RemoteRegion(asked.incarnation, "kv"), range(5), names(5))
    assert again.present == done.new
    assert len(again.new) == 1


async def test_a_lease_lets_its_holder_read_its_blocks_and_nobody_else(
    source: Engine, node: Daemon, engine: MakeEngine, seed: int
) -> None:
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
    source: Engine, node: Daemon, seed: int
) -> None:
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
    source: Engine, node: Daemon, engine: MakeEngine, seed: int
) -> None:
    bad = engine("bad")
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
