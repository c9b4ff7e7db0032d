"""Pages that outlive the daemon: in files, found again after any end of it, and never wrong."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from kvxfer.control.host_pool.file_tier import FileTier
from kvxfer.control.host_pool.page import PageKey
from kvxfer.errors import TransferError
from tests.control.engines import BOUND_S, SALT, SHAPE, SMALL_SLABS, Daemon, Engine, MakeDaemon, names, parked

_FILES_NBYTES = 256 << 20
# Of pages in this test, three blocks of the disk.
_PAGE_NBYTES = math.prod(SHAPE) // SHAPE[2] * 2
# Three slabs of four pages.
_SMALL = {"nbytes": 12 * _PAGE_NBYTES, "slab_nbytes": 4 * _PAGE_NBYTES}


@asynccontextmanager
async def keeping(daemon: MakeDaemon, folder: Path, **more: object) -> AsyncIterator[Daemon]:
    """A daemon's pool over the files of a folder, for one run."""
    files = await FileTier.open(folder / "pages", _FILES_NBYTES)
    node = daemon(files=files, **{**_SMALL, **more})
    try:
        yield node
    finally:
        await node.aclose()


async def written(node: Daemon) -> None:
    """Waits until all parked pages are in files."""
    assert node.pool.behind is not None
    assert await node.pool.behind.drained(BOUND_S)


async def found(node: Daemon, reader: Engine, keys: list[PageKey]) -> dict[str, int]:
    """Reads pages, and returns the checksums of those that are there."""
    sums: dict[str, int] = {}
    for key in keys:  # one after the other: the pool is smaller than all of them
        await node.pool.load([key], BOUND_S)
        leased = node.pool.lease([key], reader.agent.name)
        for part in leased.parts:
            sums |= zip((each.key for each in part.keys), await reader.fetch(part), strict=True)
        await node.pool.revoke(leased.number)
    return sums


async def test_pages_outlive_memory_and_the_daemon(
    engine: Callable[..., Engine], daemon: MakeDaemon, tmp_path: Path, seed: int
) -> None:
    source, reader = engine("prefill"), engine("decode")
    source.fill(seed)
    wanted = dict(zip(names(24), source.sums(range(24)), strict=True))
    keys = source.keys(names(24))
    async with keeping(daemon, tmp_path) as node:
        for first in range(0, 24, 4):  # more than memory holds
            await parked(node, source, 4, first)
            await written(node)
        assert node.pool.stats().pages.num_evicted > 0
        assert await found(node, reader, keys) == wanted
        # What is in files is not read from the engine again.
        assert (await parked(node, source, 4)).new == []
    async with keeping(daemon, tmp_path) as node:
        assert await found(node, reader, keys) == wanted
        assert await node.pool.drop(keys[:8]) == keys[:8]
        assert await found(node, reader, keys) == {key: wanted[key] for key in names(16, 8)}
    async with keeping(daemon, tmp_path) as node:
        assert await found(node, reader, keys) == {key: wanted[key] for key in names(16, 8)}


async def test_a_page_whose_bytes_changed_is_missing_and_counted(
    engine: Callable[..., Engine], daemon: MakeDaemon, tmp_path: Path, seed: int
) -> None:
    source, reader = engine("prefill"), engine("decode")
    source.fill(seed)
    wanted = dict(zip(names(12), source.sums(range(12)), strict=True))
    async with keeping(daemon, tmp_path) as node:
        await parked(node, source, 12)
        await written(node)
    (pages,) = (tmp_path / "pages").glob("*.pages")
    draw = random.Random(seed)
    # One bit of every other page, wherever it lies.
    harmed = np.memmap(pages, np.uint8, "r+")
    for slot in range(0, 12, 2):
        harmed[slot * _PAGE_NBYTES + draw.randrange(_PAGE_NBYTES)] ^= 1 << draw.randrange(8)
    harmed.flush()
    async with keeping(daemon, tmp_path) as node:
        sums = await found(node, reader, source.keys(names(12)))
        assert len(sums) == 6
        assert sums.items() <= wanted.items()
        assert node.pool.files is not None
        assert node.pool.files.figures()["damaged_total"] == 6
        # They can be parked anew.
        assert len((await parked(node, source, 12)).new) == 6


async def test_a_drop_is_a_fence_for_what_is_being_read(
    engine: Callable[..., Engine], daemon: MakeDaemon, tmp_path: Path, seed: int
) -> None:
    """Whenever it comes, nothing is found afterwards, in memory or in files."""
    source, reader = engine("prefill"), engine("decode")
    draw = random.Random(seed)
    keys = source.keys(names(8))
    async with keeping(daemon, tmp_path) as node:
        for _ in range(20):
            source.fill(draw.getrandbits(32))
            await parked(node, source, 8)
            if draw.random() < 0.5:
                await written(node)
            loading = asyncio.ensure_future(node.pool.load(keys, BOUND_S))
            for _ in range(draw.randrange(6)):
                await asyncio.sleep(0)
            await node.pool.drop(keys)
            await loading
            assert await found(node, reader, keys) == {}
        assert node.pool.stats().pages.used_nbytes == 0


async def test_a_durable_page_waits_for_the_disk_and_says_if_it_cannot(
    engine: Callable[..., Engine], daemon: MakeDaemon, tmp_path: Path
) -> None:
    source = engine("prefill")
    async with source.region.grant(daemon_name := "daemon/n", ttl_s=BOUND_S) as lease:
        async with keeping(daemon, tmp_path) as node:
            assert node.own.name == daemon_name
            park = node.pool.park(
                SALT, source.place, [0, 1], names(2), lease=lease.token, durable=True, timeout_s=BOUND_S
            )
            assert len((await park).new) == 2
            assert node.pool.files is not None
            assert node.pool.files.look_up(source.keys(names(2))) == [True, True]
        plain = daemon(**SMALL_SLABS)
        with pytest.raises(Exception, match="has no files"):
            await plain.pool.park(SALT, source.place, [0], ["k0"], lease=lease.token, durable=True)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda folder: (folder / "format").write_text("kvxfer pages 9\n"), "has format 9"),
        (lambda folder: (folder / "format").write_text("something else\n"), "no pages of kvxfer"),
        (lambda folder: folder.chmod(0o755), "chmod 700"),
    ],
)
async def test_a_directory_that_cannot_be_used_is_refused_and_left_as_it_is(
    tmp_path: Path, harm: Callable[[Path], object], words: str
) -> None:
    folder = tmp_path / "pages"
    tier = await FileTier.open(folder, _FILES_NBYTES)
    with pytest.raises(TransferError, match="another process"):
        await FileTier.open(folder, _FILES_NBYTES)
    await tier.aclose(None)
    harm(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(TransferError, match=words):
        await FileTier.open(folder, _FILES_NBYTES)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
