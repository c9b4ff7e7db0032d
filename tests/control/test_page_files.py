"""Pages that outlive the daemon: in files, found again after any end of it, and never wrong."""

from __future__ import annotations

import asyncio
import math
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvxfer import AgentOptions
from kvxfer.control.host_pool.file_tier import FileTier
from kvxfer.control.host_pool.page import PageKey
from kvxfer.errors import TransferError
from kvxfer.memory.page_files import open_page_files
from kvxfer.memory.pool import Pool
from kvxfer.testing.pair import connected_pair
from tests.control.engines import BOUND_S, SALT, SHAPE, SMALL_SLABS, Daemon, Engine, MakeDaemon, names, parked
from tests.control.serving import program
from tests.fork_server import Forked
from tests.waiting import until

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
        with pytest.raises(TransferError, match="too slow: reading 4 pages"):
            await node.pool.load(keys[:4], BOUND_S, worth_s=1e-9)
        assert await found(node, reader, keys) == wanted
        assert await node.pool.drop(keys[:8]) == keys[:8]
        assert await found(node, reader, keys) == {key: wanted[key] for key in names(16, 8)}
    async with keeping(daemon, tmp_path) as node:
        assert await found(node, reader, keys) == {key: wanted[key] for key in names(16, 8)}


async def test_pages_keep_their_bytes_whoever_parks_next_and_however_large_the_pool_is(
    engine: Callable[..., Engine], daemon: MakeDaemon, tmp_path: Path, seed: int
) -> None:
    """The same contents in another order of axes; slabs in which a page takes more than it has bytes."""
    first, other = engine("prefill"), engine("other", "bl2htd")
    first.fill(seed)
    other.fill(seed + 1)
    async with keeping(daemon, tmp_path) as node:
        await parked(node, first, 4)
        await written(node)
    larger = {"nbytes": 20 * _PAGE_NBYTES, "slab_nbytes": 5 * _PAGE_NBYTES - 3 * 4096}
    async with keeping(daemon, tmp_path, **larger) as node:
        await parked(node, other, 4, 8)
        await written(node)
        wanted = dict(zip(names(4), first.sums(range(4)), strict=True))
        wanted |= zip(names(4, 8), other.sums(range(8, 12)), strict=True)
        for axes in ("l2bthd", "bl2htd"):
            reader = engine(f"decode-{axes}", axes)
            assert await found(node, reader, first.keys([*wanted])) == wanted
    # A line of the file of salts that is lost takes its pages with it, for good.
    salts = tmp_path / "pages/salts"
    salts.write_bytes(salts.read_bytes()[:-2])
    async with keeping(daemon, tmp_path) as node:
        assert await found(node, engine("decode-3"), first.keys(names(4))) == {}
        await parked(node, other, 1, 20)
        await written(node)
    async with keeping(daemon, tmp_path) as node:
        assert await found(node, engine("decode-4"), first.keys(names(4))) == {}


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
    (folder / "salts").write_text("a line that its owner is writing")
    with pytest.raises(TransferError, match="another process"):
        await FileTier.open(folder, _FILES_NBYTES)
    assert (folder / "salts").read_text() == "a line that its owner is writing"
    await tier.aclose(None)
    harm(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(TransferError, match=words):
        await FileTier.open(folder, _FILES_NBYTES)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


# ---- processes that are killed -------------------------------------------------------------------------

_WRITTEN_NBYTES = 4096 * 5


def _content(number: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, _WRITTEN_NBYTES, np.uint8)


def _digest(number: int) -> bytes:
    return PageKey("", "m", "", "", str(number)).digest()


def write_until_killed(folder: str, first: str) -> None:
    """Writes page after page, eight at a time, and prints the number of each that is durable."""
    memory = Pool(8, _WRITTEN_NBYTES, huge_pages=False).array((8, _WRITTEN_NBYTES))
    files = open_page_files(Path(folder), _FILES_NBYTES, [0])
    number, places, under_way = int(first), list(range(8)), dict[int, int]()
    while True:
        while places:
            place, number = places.pop(), number + 1
            memory[place] = _content(number)
            address = memory[place].ctypes.data
            assert (
                files.write(_digest(number), 0, str(number), address, _WRITTEN_NBYTES, True, number)
                == "begun"
            )
            under_way[number] = place
        select.select([files.event_fd], [], [])
        for ticket, how, _ in files.take_ended()[0]:
            assert how == "done"
            places.append(under_way.pop(ticket))
            print(ticket, flush=True)


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(50, marks=pytest.mark.timeout(900)),  # a busy disk syncs a few times a second
        pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_what_is_durable_outlives_kills_and_nothing_torn_is_read(
    rounds: int, tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    durable: list[int] = []
    memory = Pool(1, _WRITTEN_NBYTES, huge_pages=False).array()
    program = (
        "import sys; from tests.control import test_page_files as t; t.write_until_killed(*sys.argv[1:])"
    )
    last = 0
    for _ in range(rounds):
        writer = Forked(
            program,
            *(str(tmp_path / "pages"), str(last)),
            engine="tests.control.forked",
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        durable.append(int(writer.stdout.readline()))
        time.sleep(draw.random() * 0.03)
        writer.kill()
        durable += [int(line) for line in writer.stdout if line.endswith("\n")]
        writer.communicate()
        last = max(durable) + 100
        del durable[:-2000]  # those before may be evicted
        files = open_page_files(tmp_path / "pages", _FILES_NBYTES, [0])
        for number in {*range(max(last - 150, 1), last), *draw.sample(durable, min(len(durable), 10))}:
            answer = files.read(_digest(number), memory.ctypes.data, _WRITTEN_NBYTES, 0.0, number + 1)
            if answer == "begun":
                select.select([files.event_fd], [], [])
                [(_, how, _)], _ = files.take_ended()
                assert how == "done"  # torn pages have no head
                assert (memory == _content(number)).all()
            else:
                assert number not in durable
        assert files.close(BOUND_S)


def test_a_killed_daemon_serves_its_pages_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The command line, REST, the daemon, its agent, the wire, and the bytes in an engine's cache."""
    monkeypatch.setattr("kvxfer.daemon_link.link._LONGEST_RETRY_S", 0.2)
    arguments = ["--pool-gib", str(1 / 64), "--pages-dir", str(tmp_path / "kv"), "--pages-gib", "0.25"]
    options = AgentOptions(
        daemon=str(tmp_path / "run"), daemon_may=("show", "grant"), silent_timeout_s=BOUND_S
    )

    def kvxfer(*words: str) -> str:
        command = [sys.executable, "-m", "kvxfer", *words, "--daemon", str(tmp_path / "run/api.sock")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with connected_pair(options) as pair:
        pair.prefill.fill(seed % 1000)
        wanted = pair.prefill.blocks([3, 5])
        with program(tmp_path, *arguments, agent=True) as first:
            until(lambda: "prefill" in kvxfer("agents"), "the agents are not attached")
            body = {"model": "m", "keys": ["a", "b"], "agent": "prefill", "region": "kv", "blocks": [3, 5]}
            with first.client() as client:
                parked = client.post("/v1/pages/park", json={**body, "acknowledge": "durable"})
                assert parked.is_success, parked.text
            first.end(signal.SIGKILL)
        with program(tmp_path, *arguments, agent=True):
            until(lambda: "prefill" in kvxfer("agents"), "the agents are not attached")
            assert re.search(r"^a .* files ", kvxfer("pages"), re.MULTILINE)
            pair.prefill.array[:] = 0
            kvxfer("pages", "fetch", "prefill/kv:1,2", "a", "b", "--model", "m")
            assert (pair.prefill.blocks([1, 2]) == wanted).all()
            kvxfer("pages", "drop", "a", "b", "--model", "m")
        with program(tmp_path, *arguments, agent=True):
            assert kvxfer("pages") == ""
