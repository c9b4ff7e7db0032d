"""Memory of processes without an agent: handed over, moved by the daemons' agents, and taken back."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import mmap
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer import KVLayout, KvxferError, PeerError, Region, UsageError
from kvxfer.control.handed import handed_memory
from kvxfer.control.handed.hand_over import HandedOver, hand_over, shared_array
from kvxfer.control.handed.handed_line import MAX_LINE_NBYTES, HandedLine
from kvxfer.control.handed.handed_memory import HandedMemory
from kvxfer.control.own.own_agent import OwnAgent, RemoteRegion
from kvxfer.gpu import driver
from tests.control.engines import BOUND_S, SALT, Daemon, options
from tests.waiting import until_on_loop

ROOT = Path(__file__).resolve().parents[2]
SHAPE = (3, 2, 24, 8, 4, 32)
LARGE = (8, 2, 64, 64, 4, 128)  # 64 MiB: the transfer takes long enough to be interrupted


class Memory:
    """A daemon's agent that accepts memory, in its own folder."""

    def __init__(self, folder: Path, node: str, **more: Any) -> None:
        folder.mkdir(mode=0o700)
        self.folder = folder
        self.parent = OwnAgent(node, options())
        self.changes: list[tuple[str, bool]] = []
        self.handed = HandedMemory(
            folder, self.parent, on_change=lambda each, came: self.changes.append((each.name, came)), **more
        )

    @property
    def own(self) -> OwnAgent:
        """The agent that has the regions."""
        return self.handed.agent

    async def until(self, count: int) -> None:
        """Waits until this number of memories is handed over."""
        await until_on_loop(lambda: len(self.handed._names) == count)

    async def aclose(self) -> None:
        await self.handed.aclose()
        await self.parent.aclose()


class Process:
    """A process that has handed memory over."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.region = self.agent = self.incarnation = self.address = ""

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.wait_for(self.process.stdout.readline(), BOUND_S)).decode().strip()

    async def ask(self, words: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(words.encode() + b"\n")
        return await self.line()

    async def sums(self, blocks: range) -> list[str]:
        return (await self.ask("sums " + " ".join(map(str, blocks)))).split()

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()

    @property
    def place(self) -> RemoteRegion:
        return RemoteRegion(self.agent, self.region, self.address)


@pytest.fixture
async def memory(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Makes daemons' agents that accept memory."""
    made: list[Memory] = []

    async def make(node: str = "n", **more: Any) -> Memory:
        made.append(Memory(tmp_path / node, node, **more))
        await made[-1].handed.start()
        return made[-1]

    yield make
    for each in made:
        await each.aclose()


@pytest.fixture
async def process() -> AsyncIterator[Callable[..., Any]]:
    """Starts processes that hand memory over."""
    started: list[Process] = []

    async def start(
        to: Memory, name: str = "cache", seed: int = 0, shape: tuple[int, ...] = SHAPE, axes: str = "l2bthd"
    ) -> Process:
        found = Process(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.control.handing_process", str(to.folder), name, str(seed)),
                *(",".join(map(str, shape)), axes),
                cwd=ROOT,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        )
        started.append(found)
        found.region, found.agent, found.incarnation, found.address = (await found.line()).split()
        return found

    yield start
    for each in started:
        await each.kill()


def small() -> tuple[Any, KVLayout]:
    array = shared_array((2, 6, 64), np.uint8)
    return array, KVLayout.from_tensor(array, "lbd")


async def handed(to: Memory, name: str = "cache", **more: Any) -> HandedOver:
    array, layout = small()
    return await asyncio.to_thread(hand_over, array, layout, name, daemon=to.folder, **more)


# ---- pages move -------------------------------------------------------------------------------


async def test_pages_move_between_two_programs_that_have_no_agent(
    memory: Callable[..., Any], process: Callable[..., Any], seed: int
) -> None:
    """Pull and push between two nodes, each fenced by a lease."""
    one, two = await memory("one"), await memory("two")
    here, there = await process(one, seed=seed), await process(two, seed=seed + 1, axes="l2bhtd")
    assert (here.region, there.agent) == ("memory/cache@one", "daemon/two/memory")
    # Pull: the owner of the pages grants them to the reader's name.
    lease = two.own.grant(there.region, one.own.name, range(4), ttl_s=BOUND_S)
    remote = await one.own.remote_region(there.place)
    await one.own.read(here.region, remote, range(4), range(8, 12), lease=lease.token)
    assert await here.sums(range(8, 12)) == await there.sums(range(4))
    await two.own.revoke(lease.number)
    with pytest.raises(KvxferError):
        await one.own.read(here.region, remote, range(4), range(8, 12), lease=lease.token)
    # Push: to write it takes the session that is open now.
    lease = two.own.grant(there.region, one.own.name, range(10, 12), "write", ttl_s=BOUND_S)
    await one.own.write(here.region, remote, range(2), range(10, 12), lease=lease.token)
    assert await there.sums(range(10, 12)) == await here.sums(range(2))
    with pytest.raises(KvxferError):
        await one.own.write(here.region, remote, range(2), range(12, 14), lease=lease.token)
    await one.own.revoke(lease.number)  # a region of another agent, unknown here
    await two.own.revoke(lease.number)
    assert not two.own.leases


async def test_a_program_without_an_agent_parks_its_pages(
    memory: Callable[..., Any], process: Callable[..., Any], daemon: Callable[..., Daemon], seed: int
) -> None:
    """A daemon has two agents: one has the pool, the other has handed-over memory."""
    node, taken = daemon("node"), await memory("node")
    program = await process(taken, seed=seed)
    lease = taken.own.grant(program.region, node.own.name, ttl_s=BOUND_S)
    done = await node.pool.park(SALT, program.place, range(4), ["a", "b", "c", "d"], lease=lease.token)
    (part,) = node.pool.lease(done.new, taken.own.name).parts
    remote = await taken.own.remote_region(RemoteRegion(node.own.name, part.region.name, node.own.address))
    await taken.own.read(program.region, remote, part.blocks, range(10, 14), lease=part.token)
    assert await program.sums(range(10, 14)) == await program.sums(range(4))


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
async def test_the_example_in_c(memory: Callable[..., Any], tmp_path: Path) -> None:
    program = tmp_path / "hand_over"
    compiler = await asyncio.create_subprocess_exec(
        *("cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-o", str(program), "examples/hand_over.c"),
        cwd=ROOT,
    )
    assert await compiler.wait() == 0
    taken, other = await memory("one"), await memory("two")
    example = Process(
        await asyncio.create_subprocess_exec(
            *(str(program), str(taken.handed.path), "pages"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
    )
    try:
        told = json.loads(await example.line())
        assert told["agent"] == "daemon/one/memory"
        assert told["region"] == "memory/pages@one"
        array = shared_array((8, 1 << 16), np.uint8)
        layout = KVLayout.from_tensor(array, "bd")
        mine = await asyncio.to_thread(hand_over, array, layout, "mine", daemon=other.folder)
        lease = taken.own.grant(told["region"], other.own.name, ttl_s=BOUND_S)
        remote = await other.own.remote_region(RemoteRegion(told["agent"], told["region"], told["address"]))
        await other.own.read(mine.region, remote, range(40, 48), range(8), lease=lease.token)
        assert (array == np.arange(40, 48)[:, None]).all()
        write = taken.own.grant(told["region"], other.own.name, [1], "write", ttl_s=BOUND_S)
        await other.own.write(mine.region, remote, [7], [1], lease=write.token)
        await asyncio.to_thread(mine.close)
        out, _ = await asyncio.wait_for(example.process.communicate(b""), BOUND_S)
    finally:
        await example.kill()
    gone, first_bytes = out.decode().splitlines()
    assert json.loads(gone) == {"gone": True}
    assert first_bytes.split() == [str(47 if page == 1 else page) for page in range(64)]
    assert example.process.returncode == 0
    taken = await memory("three", allowed_uids=[])
    refused = await asyncio.create_subprocess_exec(
        *(str(program), str(taken.handed.path), "pages"), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(refused.communicate(), BOUND_S)
    assert json.loads(out)["error"]["code"] == "not-permitted"
    assert refused.returncode == 1


# ---- its end ----------------------------------------------------------------------------------


async def test_memory_is_a_region_until_it_is_taken_back(memory: Callable[..., Any]) -> None:
    taken = await memory()
    for _ in range(3):
        mine = await handed(taken)
        assert list(taken.own.agent.regions) == [mine.region] == list(taken.handed.regions)
        assert taken.handed.regions[mine.region].pid == os.getpid()
        await asyncio.to_thread(mine.close)
        assert not taken.own.agent.regions
        assert not taken.handed.regions
        mine.close()
    assert taken.changes == [("memory/cache@n", True), ("memory/cache@n", False)] * 3
    assert taken.handed._nbytes == 0


async def test_a_process_that_is_killed_in_the_middle_ends_its_transfers_alone(
    memory: Callable[..., Any], process: Callable[..., Any], seed: int
) -> None:
    one, two = await memory("one"), await memory("two")
    here, there = await process(one, shape=LARGE), await process(two, shape=LARGE, seed=seed)
    stays = await process(two, "stays", seed=seed)
    remote = await one.own.remote_region(there.place)
    lease = two.own.grant(there.region, one.own.name, ttl_s=BOUND_S)
    transfer = None
    for round_ in range(100):  # until a transfer is interrupted in its middle
        transfer = one.own.read(
            here.region, remote, range(64), range(64), lease=lease.token, timeout_s=BOUND_S, priority=round_
        )
        if round_ >= 2:
            there.process.kill()
            break
        await transfer
    assert transfer is not None
    # Bytes that the read had not moved by then are not moved, because the region has gone.
    with contextlib.suppress(KvxferError):
        await transfer
    await there.kill()
    await two.until(1)
    with pytest.raises(KvxferError) as gone:
        await one.own.read(here.region, remote, range(64), range(64), lease=lease.token, timeout_s=BOUND_S)
    assert gone.value.code in ("region-gone", "lease-ended", "unknown-region")
    await asyncio.wait_for(two.own.leases.ended(), BOUND_S)
    assert not two.own.leases
    assert list(two.handed.regions) == [stays.region]
    assert len(await here.sums(range(2))) == 2
    again = await process(two, seed=seed)
    assert again.region == there.region


async def test_what_the_writer_was_handed_goes_in_the_middle_of_a_push(
    memory: Callable[..., Any], process: Callable[..., Any], seed: int
) -> None:
    """The end that posted loses its memory: its transfer ends with region-gone."""
    one, two = await memory("one"), await memory("two")
    here, there = await process(one, shape=LARGE), await process(two, shape=LARGE, seed=seed)
    remote = await one.own.remote_region(there.place)
    held = one.own.agent.write(
        one.own.region(here.region),
        remote,
        range(64),
        range(64),
        hold=True,
        notify=b"never",
        timeout_s=BOUND_S,
    )
    here.process.kill()
    with pytest.raises(KvxferError) as gone:
        await held
    assert gone.value.code == "region-gone"
    await one.until(0)
    assert len(await there.sums(range(2))) == 2


async def test_the_daemon_ends_and_the_process_hears_of_it(memory: Callable[..., Any]) -> None:
    taken = await memory()
    mine = await handed(taken)
    await taken.aclose()
    assert not taken.handed.path.exists()
    assert not taken.handed._names
    await asyncio.to_thread(mine.close)
    with pytest.raises(PeerError, match="does not answer"):
        await handed(taken)


@pytest.mark.parametrize("is_closed", [False, True])
async def test_while_it_cannot_be_deregistered_memory_stays_mapped_and_is_not_said_to_be_free(
    memory: Callable[..., Any],
    is_closed: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = await memory()
    deregister, tries, is_broken = Region.deregister, [], True

    async def fail(region: Region, timeout_s: float | None = None) -> None:
        tries.append(region.name)
        if is_broken:
            raise KvxferError("a device fails", code="system")
        await deregister(region, timeout_s)

    monkeypatch.setattr(Region, "deregister", fail)
    array = shared_array(SHAPE, np.uint16)
    handed = await asyncio.to_thread(
        hand_over, array, KVLayout.from_tensor(array, "l2bthd"), "cache", daemon=one.folder
    )
    mapped = one.handed.regions[handed.region].memory
    closing = asyncio.create_task(asyncio.to_thread(handed.close, BOUND_S))
    await until_on_loop(lambda: len(tries) >= 2)
    assert not closing.done()
    assert one.changes == [(handed.region, True)]
    assert one.handed._nbytes == mapped.nbytes
    if is_closed:
        await one.handed.aclose()
    is_broken = False
    await closing
    await one.until(0)
    assert one.changes == [(handed.region, True), (handed.region, False)]
    assert one.handed._nbytes == 0
    assert caplog.text.count("stays mapped") == 1


async def test_a_socket_that_was_left_is_taken_over(memory: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "m"
    taken = Memory(folder, "m")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / "memory.sock"))
    await taken.handed.start()
    assert (folder / "memory.sock").stat().st_mode & 0o777 == 0o600
    await asyncio.to_thread((await handed(taken)).close)
    await taken.aclose()


# ---- what is refused --------------------------------------------------------------------------


def memfd(nbytes: int = 4096, seals: int | None = None, flags: int = os.MFD_ALLOW_SEALING) -> int:
    fd = os.memfd_create("test", flags | os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, nbytes)
    if seals is None:
        seals = fcntl.F_SEAL_SHRINK
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def document(**changes: Any) -> dict[str, Any]:
    """A layout of 4096 bytes."""
    layout = json.loads(KVLayout.from_tensor(np.zeros((16, 256), np.uint8), "bd").to_bytes())
    return {**layout, **changes}


def num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def holes(_: Path) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def file_of(folder: Path) -> int:
    (folder / "file").write_bytes(bytes(4096))
    return os.open(folder / "file", os.O_RDWR)


def pipe(_: Path) -> int:
    read, write = os.pipe()
    os.close(read)
    return write


BAD: dict[str, tuple[dict[str, Any], Callable[[Path], int], str]] = {
    "memory that may shrink": ({}, lambda _: memfd(seals=0), "may shrink"),
    "memory that cannot be sealed": ({}, lambda _: memfd(seals=0, flags=0), "may shrink"),
    "memory that cannot be written": (
        {},
        lambda _: memfd(seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE),
        "cannot be mapped",
    ),
    "memory that is not filled": ({}, holes, "has 0 of its"),
    "a file": ({}, file_of, "of a file"),
    "a pipe": ({}, pipe, "not of memory"),
    "a device": ({}, lambda _: os.open("/dev/zero", os.O_RDWR), "not of memory"),
    "a layout larger than the memory": ({"layout": document(num_blocks=17)}, lambda _: memfd(), "spans 4352"),
    "a layout larger than what is named": ({"nbytes": 4095}, lambda _: memfd(), "spans 4096"),
    "a layout larger than any": (
        {"layout": document(block_stride=1 << 50, num_blocks=1 << 20)},
        lambda _: memfd(),
        "layout",
    ),
    "more than there is": ({"nbytes": 8192}, lambda _: memfd(), "exceed a memfd"),
    "behind the end": ({"offset": 4096}, lambda _: memfd(), "exceed a memfd"),
    "before the begin": ({"offset": -4096}, lambda _: memfd(), "offset must be a whole number"),
    "a fraction": ({"nbytes": 4096.0}, lambda _: memfd(), "nbytes must be a whole number"),
    "negative offsets in the layout": (
        {"layout": document(offset=-256)},
        lambda _: memfd(),
        "offset is -256",
    ),
    "no layout": ({"layout": None}, lambda _: memfd(), "layout must be a JSON object"),
    "no name": ({"name": ""}, lambda _: memfd(), "name must be a text"),
    "a long name": ({"name": "x" * 65}, lambda _: memfd(), "name must be a text"),
    "a name of two lines": ({"name": "a\nb"}, lambda _: memfd(), "cannot be printed"),
    "a handle of a GPU": (
        {"cuda_handle": {"kind": "descriptor", "allocated_nbytes": 4096}},
        lambda _: memfd(),
        "no GPU",
    ),
}
HEX = "ab" * 64
# Handles of a GPU's memory for the 4096 bytes that the layout spans, and what is read from them.
GPU_LINES: dict[str, tuple[dict[str, Any], dict[str, Any] | str]] = {
    "a descriptor": ({"kind": "descriptor", "allocated_nbytes": 4096}, {"num_descriptors": 1}),
    "a fabric handle": (
        {"kind": "fabric", "allocated_nbytes": 1 << 48, "handle": HEX},
        {"num_descriptors": 0, "handle": b"\xab" * 64},
    ),
    "no object": ("00", "cuda_handle must be an object"),  # type: ignore[dict-item]
    "more than there is to say": ({"kind": "descriptor", "gpu": 0}, "cuda_handle must be an object"),
    "of another kind": ({"kind": "win32", "allocated_nbytes": 4096}, "kind must be"),
    "a descriptor with a handle": (
        {"kind": "descriptor", "allocated_nbytes": 4096, "handle": HEX},
        "kind must be",
    ),
    "a handle of other letters": (
        {"kind": "fabric", "allocated_nbytes": 4096, "handle": "G" * 128},
        "128 digits",
    ),
    "of cudaMalloc": ({"kind": "ipc", "allocated_nbytes": 4096, "handle": HEX}, "cuMemCreate"),
    "of nothing": ({"kind": "descriptor", "allocated_nbytes": 0}, "size of the whole allocation"),
    "of more than any GPU has": (
        {"kind": "descriptor", "allocated_nbytes": (1 << 48) + 1},
        "size of the whole allocation",
    ),
    "less than the layout spans": ({"kind": "descriptor", "allocated_nbytes": 4095}, "spans 4096"),
}


def ask(path: Path, payload: bytes, fds: list[int]) -> dict[str, Any]:
    """Sends any bytes, and returns the answer; {} if the daemon only closed the connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(BOUND_S)
        connection.connect(str(path))
        answer = bytearray()
        try:
            sent = socket.send_fds(connection, [payload], fds)
            connection.sendall(payload[sent:])
        except (BrokenPipeError, ConnectionResetError):
            pass
        try:
            while not answer.endswith(b"\n") and (part := connection.recv(65536)):
                answer += part
        except ConnectionResetError:
            pass
    return json.loads(answer) if answer else {}


async def asked(to: Memory, payload: bytes, fds: list[int]) -> dict[str, Any]:
    return await asyncio.to_thread(ask, to.handed.path, payload, fds)


def words(told: dict[str, Any]) -> str:
    return str(told["error"]["message"])


@pytest.mark.parametrize("name", BAD)
async def test_what_no_daemon_should_map_is_refused_in_words(
    memory: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    taken = await memory()
    change, make, said = BAD[name]
    fd = make(tmp_path)
    try:
        line = {"name": "cache", "layout": document(), **change}
        assert said in words(await asked(taken, json.dumps(line).encode() + b"\n", [fd]))
    finally:
        os.close(fd)
    await taken.until(0)
    assert not taken.own.agent.regions
    assert taken.handed._nbytes == 0


@pytest.mark.parametrize("name", GPU_LINES)
def test_handles_of_a_gpus_memory_are_read_or_refused_in_words(name: str) -> None:
    told, expected = GPU_LINES[name]
    line = json.dumps({"name": "cache", "layout": document(), "cuda_handle": told}).encode()
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=expected):
            HandedLine.read(line)
        return
    found = HandedLine.read(line)
    assert found.gpu is not None
    assert {key: getattr(found.gpu, key) for key in expected} == expected
    assert found.gpu.allocated_nbytes == told["allocated_nbytes"] == found.nbytes


DESCRIPTOR = {"kind": "descriptor", "allocated_nbytes": 4096}
FABRIC = {"kind": "fabric", "allocated_nbytes": 4096, "handle": HEX}


@pytest.mark.skipif(not driver.look().failure, reason="there is a driver, which may take the handles")
@pytest.mark.parametrize(
    ("handle", "make", "said"),
    [
        (DESCRIPTOR, None, "send one, of the allocation"),
        (FABRIC, lambda _: memfd(), "a fabric handle needs no descriptor"),
        (DESCRIPTOR, lambda _: memfd(), "not of GPU memory"),
        (DESCRIPTOR, pipe, "not of GPU memory"),
        (DESCRIPTOR, file_of, "not of GPU memory"),
        (DESCRIPTOR, lambda _: os.open("/dev/null", os.O_RDWR), "no CUDA driver"),
        (FABRIC, None, "no CUDA driver"),
    ],
)
async def test_a_handle_that_cannot_be_mapped_is_refused_and_leaves_nothing(
    memory: Callable[..., Any], tmp_path: Path, handle: dict[str, Any], make: Any, said: str
) -> None:
    taken = await memory()
    taken.handed._gpu = 0  # as far as a machine without a GPU can go
    fds = [] if make is None else [make(tmp_path)]
    before = num_descriptors()
    line = json.dumps({"name": "cache", "layout": document(), "cuda_handle": handle}).encode() + b"\n"
    assert said in words(await asked(taken, line, fds))
    await taken.until(0)
    await until_on_loop(lambda: num_descriptors() <= before)
    for fd in fds:
        os.close(fd)
    assert not taken.own.agent.regions
    # The name is free again, for host memory too.
    mine = await handed(taken)
    await asyncio.to_thread(mine.close)


@pytest.mark.parametrize(
    ("payload", "num_fds", "said"),
    [
        (b"{}\n", 0, "name must be a text"),
        (b"[]\n", 1, "what is handed over"),
        (b'{"name": "a", "name": "b"}\n', 1, "what is handed over"),
        (b"[" * 100000 + b"\n", 1, "what is handed over"),
        (b"{}\n{}\n", 1, "more data came after"),
        (b"x" * (MAX_LINE_NBYTES + 1), 1, "longer than"),
        (json.dumps({"name": "cache", "layout": document()}).encode() + b"\n", 0, "0 descriptors"),
        (json.dumps({"name": "cache", "layout": document()}).encode() + b"\n", 2, "2 descriptors"),
        (b"{}\n", 9, "too many descriptors"),
    ],
)
async def test_lines_that_are_none_are_refused(
    memory: Callable[..., Any], payload: bytes, num_fds: int, said: str
) -> None:
    taken = await memory()
    before = num_descriptors()
    fd = memfd()
    assert said in words(await asked(taken, payload, [fd] * num_fds))
    os.close(fd)
    # The connection is forgotten before its socket is closed.
    await until_on_loop(lambda: not taken.handed._connections and num_descriptors() <= before)


async def test_a_line_without_an_end_is_not_kept(memory: Callable[..., Any]) -> None:
    """A gibibyte is sent; the daemon reads less than a mebibyte."""
    taken = await memory()

    def flood() -> int:
        sent, piece = 0, bytes(1 << 20)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(BOUND_S)
            connection.connect(str(taken.handed.path))
            try:
                while sent < 1 << 30:
                    sent += connection.send(piece)
            except OSError:
                pass
        return sent

    assert await asyncio.to_thread(flood) < 1 << 22
    await asyncio.to_thread((await handed(taken)).close)


async def test_who_says_nothing_or_too_little_holds_nothing_for_long(
    memory: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = await memory()
    monkeypatch.setattr(handed_memory, "_LINE_TIMEOUT_S", 0.1)
    for payload in (b"", b'{"name": '):
        assert "no line" in words(await asked(taken, payload, []) if payload else await _silent(taken))
    with socket.socket(socket.AF_UNIX) as connection:  # and closes
        connection.connect(str(taken.handed.path))
    await until_on_loop(lambda: not taken.handed._connections)


async def _silent(taken: Memory) -> dict[str, Any]:
    reader, writer = await asyncio.open_unix_connection(str(taken.handed.path))
    line = await asyncio.wait_for(reader.readline(), BOUND_S)
    writer.close()
    await writer.wait_closed()
    return dict(json.loads(line))


async def test_a_thousand_connections_and_their_bounds(memory: Callable[..., Any]) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    taken = await memory()
    loop = asyncio.get_running_loop()
    idle = []
    try:
        for _ in range(1000):
            idle.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            await loop.sock_connect(idle[-1], str(taken.handed.path))
        await until_on_loop(lambda: len(taken.handed._connections) == 1000)
        mine = [await handed(taken, str(number)) for number in range(24)]
        with pytest.raises(UsageError, match="1024 processes"):
            await handed(taken, "more")
        for each in mine:
            await asyncio.to_thread(each.close)
        await asyncio.to_thread((await handed(taken)).close)
    finally:
        for each_socket in idle:
            each_socket.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await until_on_loop(lambda: not taken.handed._connections)


async def test_bounds_of_what_is_handed_over(
    memory: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = await memory(max_nbytes=2000)
    first = await handed(taken, "first")
    with pytest.raises(UsageError, match="already handed over, by this"):
        await handed(taken, "first")
    second = await handed(taken, "second")
    with pytest.raises(KvxferError, match="that may be handed over") as full:
        await handed(taken, "third")
    assert full.value.code == "exhausted"
    await asyncio.to_thread(second.close)
    third = await handed(taken, "third")
    monkeypatch.setattr(handed_memory, "_MOST_REGIONS", 2)
    with pytest.raises(KvxferError, match="2 memories"):
        await handed(taken, "fourth")
    for each in (first, third):
        await asyncio.to_thread(each.close)


async def test_other_users_are_refused(memory: Callable[..., Any]) -> None:
    taken = await memory(allowed_uids=[os.getuid() + 1])
    with pytest.raises(KvxferError, match="may not hand memory") as refused:
        await handed(taken)
    assert refused.value.code == "not-permitted"


# ---- the client's half ------------------------------------------------------------------------


async def test_parts_of_arrays_and_memfds_are_handed_over(memory: Callable[..., Any]) -> None:
    taken = await memory()
    array = shared_array((10, 300), np.uint8)
    array[:] = np.arange(10)[:, None]
    part = array[4:8]
    layout = KVLayout.from_tensor(part, "bd")
    mine = await asyncio.to_thread(hand_over, part, layout, "part", daemon=taken.handed.path)
    seen = taken.handed.regions[mine.region]
    assert seen.nbytes == 1200
    fd = memfd(4096)
    other = await asyncio.to_thread(
        hand_over, fd, KVLayout.from_bytes(json.dumps(document()).encode()), "fd", daemon=taken.folder
    )
    with mmap.mmap(fd, 4096) as bytes_of_fd:
        bytes_of_fd[:4] = b"four"
    os.close(fd)
    # Both are regions of one agent; a second agent reads them.
    reader = await memory("reader")
    for region, layout_, wanted in ((mine.region, layout, 4), (other.region, None, ord("f"))):
        del layout_
        lease = taken.own.grant(region, reader.own.name, ttl_s=BOUND_S)
        remote = await reader.own.remote_region(RemoteRegion(taken.own.name, region, taken.own.address))
        into = shared_array((remote.num_blocks, remote.layout.head_dim), np.uint8)
        with_it = await asyncio.to_thread(
            hand_over, into, KVLayout.from_tensor(into, "bd"), region[:20], daemon=reader.folder
        )
        await reader.own.read(with_it.region, remote, [0], [0], lease=lease.token)
        assert into[0, 0] == wanted
        await asyncio.to_thread(with_it.close)
    for each in (mine, other):
        await asyncio.to_thread(each.close)


@pytest.mark.parametrize(
    "array",
    [np.zeros((4, 8), np.uint8), shared_array((4, 8))[:, ::2], shared_array((4, 8))[:, :4]],
    ids=["ordinary", "with steps", "with gaps"],
)
def test_memory_that_cannot_be_shared_is_refused(array: Any) -> None:
    with pytest.raises(UsageError, match="shared_array"):
        hand_over(array, KVLayout.from_tensor(np.zeros((4, 4), np.uint8), "bd"), "x", daemon="/nowhere")


def test_no_daemon_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array, layout = small()
    monkeypatch.setenv("KVXFER_DAEMON_DIR", str(tmp_path))
    with pytest.raises(PeerError) as nobody:
        hand_over(array, layout, "x")
    assert nobody.value.code == "unreachable"
    assert str(tmp_path / "memory.sock") in str(nobody.value)
