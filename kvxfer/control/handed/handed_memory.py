"""Memory that processes hand over on ``memory.sock``; it is registered while they stay connected."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import mmap
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvxfer.control.handed.handed_line import MAX_LINE_NBYTES, HandedLine, require_span
from kvxfer.control.own.own_agent import OwnAgent
from kvxfer.control.state.descriptors import at_most
from kvxfer.errors import ExhaustedError, KvxferError, TransferError, UsageError, invalid
from kvxfer.gpu.peer_pages import PeerPages, map_pages
from kvxfer.log import logger
from kvxfer.region import Region
from kvxfer.session.completion import resolve

SOCKET_NAME: Final = "memory.sock"
# A process that connects and sends nothing holds a descriptor.
_LINE_TIMEOUT_S: Final = 10.0
_MOST_CONNECTIONS: Final = 1024
_MOST_REGIONS: Final = 256
_ACCEPT_AGAIN_S: Final = 0.1
# Until deregistering a region that failed is tried again; doubled each time.
_DEREGISTER_AGAIN_S: Final = 0.1
_LONGEST_AGAIN_S: Final = 10.0
# Memory of the host, or of a GPU.
Memory = NDArray[np.uint8] | PeerPages
# The unit of st_blocks, independent of the file system's block size.
_STAT_BLOCK_NBYTES: Final = 512


@dataclass(frozen=True, slots=True)
class Handed:
    """Memory that a process has handed over, registered as a region.

    Attributes
    ----------
    name
        The name of the region.
    pid, uid
        Of the process, as the kernel reports them.
    nbytes
        Size of the memory.
    handed_at
        Seconds since 1970.
    region
        The region of the daemon's agent.
    memory
        The daemon's mapping of the memory.
    """

    name: str
    pid: int
    uid: int
    nbytes: int
    handed_at: float
    region: Region
    memory: Memory


class HandedMemory:
    """Accepts memory of processes on a unix socket, and registers it with an agent of the daemon.

    A process connects, sends one line of JSON with a memfd beside it (SCM_RIGHTS), and gets one line back::

        {"name": "cache", "layout": {...}, "offset": 0, "nbytes": 1048576}
        {"region": "memory/cache@node-3", "agent": "daemon/node-3/memory", "incarnation": "...",
         "address": "tcp://..."}
        {"error": {"code": "invalid-argument", "message": "..."}}

    The memory is a region while the connection lasts. When the connection ends, also by the process's death,
    the region's transfers and leases end with ``region-gone``, and the daemon deregisters it. A process that
    shuts down its own half of the connection is sent ``{"gone": true}`` once no byte is touched any more.

    Memory of a GPU is sent as the handle of its allocation, with which the daemon maps it::

        {"name": "cache", "layout": {...}, "offset": 0, "nbytes": 1048576,
         "cuda_handle": {"kind": "descriptor", "allocated_nbytes": 2097152}}

    and it lives while the daemon maps it, even if its process dies.

    The memfd must be sealed against shrinking (F_SEAL_SHRINK), because the daemon would otherwise touch
    memory that is gone. It must be filled, so that its pages are charged to the process. All methods belong
    to one event loop.

    Parameters
    ----------
    folder
        Where the socket is made.
    own
        The daemon's agent. The memory becomes regions of its sibling ``daemon/<node>/memory`` (`agent`),
        which lives from `start` to `aclose`. So the daemon's pool can park pages of this memory, as of any
        other agent's.
    allowed_uids
        Users whose processes may hand memory over; None for the daemon's own user and root.
    max_nbytes
        Of all memory that is handed over at a time; None for the machine's memory.
    gpu
        Index of the GPU whose memory is accepted as well; None for no GPU.
    on_change
        Called when a region was added (True) or removed (False). Must not block.
    """

    def __init__(
        self,
        folder: Path,
        own: OwnAgent,
        *,
        allowed_uids: Collection[int] | None = None,
        max_nbytes: int | None = None,
        gpu: int | None = None,
        on_change: Callable[[Handed, bool], None] | None = None,
    ) -> None:
        self._path = folder / SOCKET_NAME
        self._parent = own
        self._sibling: OwnAgent | None = None
        self._allowed_uids = frozenset((0, os.getuid()) if allowed_uids is None else allowed_uids)
        self._is_private = allowed_uids is None
        self._max_nbytes = _machine_nbytes() if max_nbytes is None else max_nbytes
        self._gpu = gpu
        self._on_change = on_change
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._kept: list[Handed] = []  # until the agent is closed
        self._closing = asyncio.Event()
        self._nbytes = 0
        #: Memory that is handed over now, by the region's name. Read only.
        self.regions: dict[str, Handed] = {}
        self._names: set[str] = set()

    @property
    def agent(self) -> OwnAgent:
        """The agent that has the regions, while this listens."""
        assert self._sibling is not None, "start() makes it"
        return self._sibling

    @property
    def path(self) -> Path:
        """The socket's path."""
        return self._path

    async def start(self) -> None:
        """Starts to listen. Replaces a socket that was left behind: the folder belongs to this daemon.

        Raises
        ------
        OSError
            The socket cannot be made.
        KvxferError
            The agent cannot be made.
        """
        if self._path.is_socket():
            self._path.unlink()
        listener = socket.socket(
            socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        )
        try:
            listener.bind(str(self._path))
            self._path.chmod(0o600 if self._is_private else 0o666)  # uids are checked in any case
            listener.listen(1024)
        except BaseException:
            listener.close()
            raise
        try:
            # In a thread: it publishes itself, in a directory that this event loop may have to answer for.
            self._sibling = await asyncio.to_thread(self._parent.sibling, "memory", gpu=self._gpu)
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept(listener), name="memory.sock")

    async def aclose(self) -> None:
        """Ends all connections, deregisters their memory, and removes the socket. Idempotent."""
        if self._listener is None:
            return
        listener, self._listener = self._listener, None
        self._closing.set()
        assert self._accepting is not None
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        listener.close()
        self._path.unlink(missing_ok=True)
        for connection in self._connections:
            connection.cancel()
        while self._connections:
            await asyncio.wait(self._connections)
        if self._ending:
            await asyncio.wait(self._ending)
        await self.agent.aclose()
        for handed in self._kept:
            await self._release(handed)
        self._kept.clear()

    # ---- connections ------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                logger().warning("kvxfer: %s: %s", self._path, error)
                await asyncio.sleep(_ACCEPT_AGAIN_S)  # e.g. no descriptor is left
                continue
            if len(self._connections) >= (most := at_most(_MOST_CONNECTIONS)):
                _answer(connection, _error("exhausted", f"{most} processes are connected"))
                connection.close()
                continue
            task = asyncio.create_task(self._serve(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.setblocking(False)
            fds: list[int] = []
            try:
                handed = await self._take(connection, fds)
            except (KvxferError, OSError, ValueError) as error:
                code = error.code if isinstance(error, KvxferError) else "invalid-argument"
                _answer(connection, _error(code, str(error.args[0] if error.args else error)))
                return
            finally:
                for fd in fds:
                    os.close(fd)
            if handed is None:
                return
            try:
                self._tell(handed, True)
                _answer(
                    connection,
                    {
                        "region": handed.name,
                        "agent": self.agent.name,
                        "incarnation": self.agent.incarnation,
                        "address": self.agent.address,
                    },
                )
                await _ended(connection)
            finally:
                # A task of its own: the memory is released after the last touch even if this is cancelled.
                ending = asyncio.create_task(self._gone(handed))
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)
                await asyncio.shield(ending)
            _answer(connection, {"gone": True})

    async def _take(self, connection: socket.socket, fds: list[int]) -> Handed | None:
        """Returns the registered memory that a process has handed over; None if the process went before."""
        pid, uid = _peer_of(connection)
        if uid not in self._allowed_uids:
            raise TransferError(f"user {uid} may not hand memory to this daemon", code="not-permitted")
        try:
            async with asyncio.timeout(_LINE_TIMEOUT_S):
                line = await _line(connection, fds)
        except TimeoutError:
            raise invalid(f"no line of JSON arrived within {_LINE_TIMEOUT_S:g} s") from None
        if line is None:
            return None
        wanted = HandedLine.read(line)
        self._require_taken(wanted, len(fds))
        if len(self._names) >= _MOST_REGIONS:
            raise ExhaustedError(f"{_MOST_REGIONS} memories are already handed over", code="exhausted")
        region_name = self.agent.region_name("memory", wanted.name)
        if region_name in self._names:
            raise invalid(f"memory {wanted.name!r} is already handed over, by this or another process")
        self._names.add(region_name)  # before the first await
        try:
            memory = await self._mapped(wanted, fds)
            try:
                region = self.agent.register(region_name, memory, wanted.layout)
            except BaseException:
                await self._let_go(memory)
                raise
        except BaseException:
            self._names.discard(region_name)
            raise
        nbytes = memory.nbytes
        handed = Handed(region_name, pid, uid, nbytes, time.time(), region, memory)
        self.regions[region_name] = handed
        return handed

    def _require_taken(self, wanted: HandedLine, num_fds: int) -> None:
        """Refuses memory of a GPU if the daemon has none, and a wrong number of descriptors."""
        if wanted.gpu is not None and self._gpu is None:
            raise UsageError(
                "this daemon has no GPU, and accepts only host memory: start it with --gpu",
                code="unsupported",
            )
        needed = 1 if wanted.gpu is None else wanted.gpu.num_descriptors
        if num_fds != needed:
            what = "of a memfd" if wanted.gpu is None else "of the allocation, exported by the driver"
            words = f"send one, {what}" if needed else "a fabric handle needs no descriptor"
            raise invalid(f"{num_fds} descriptors came with the line: {words}")

    async def _mapped(self, wanted: HandedLine, fds: list[int]) -> Memory:
        """Maps the memory that is handed over, and returns it; `_let_go` unmaps it."""
        if wanted.gpu is None:
            return self._map(fds[0], wanted)
        # In a thread, because the driver may be slow; with its own descriptor, in case the caller gives up.
        fd = os.dup(fds[0]) if fds else -1
        return await asyncio.to_thread(self._map_gpu, wanted, fd)

    def _map_gpu(self, wanted: HandedLine, fd: int) -> PeerPages:
        handle = wanted.gpu
        assert handle is not None
        assert self._gpu is not None
        assert wanted.nbytes is not None
        try:
            # The driver's descriptors are of its device, or of no file at all.
            if fd >= 0 and stat.S_IFMT(os.fstat(fd).st_mode) not in (0, stat.S_IFCHR):
                raise invalid(
                    "the descriptor is not of GPU memory: send the one that "
                    "cuMemExportToShareableHandle returned"
                )
            return map_pages(
                *(self._gpu, handle.kind, handle.allocated_nbytes, handle.handle, fd),
                offset=wanted.offset,
                nbytes=wanted.nbytes,
            )
        finally:
            if fd >= 0:
                os.close(fd)

    async def _let_go(self, memory: Memory) -> None:
        """Unmaps memory that is no longer touched; the host's memory is freed with its last reference."""
        if isinstance(memory, PeerPages):
            await asyncio.to_thread(memory.close)
        else:
            self._nbytes -= memory.nbytes

    def _map(self, fd: int, wanted: HandedLine) -> NDArray[np.uint8]:
        """Maps a memfd, after checking that its memory cannot go away."""
        offset, nbytes = wanted.offset, wanted.nbytes
        at = os.fstat(fd)
        if not stat.S_ISREG(at.st_mode):
            raise invalid("the descriptor is not of memory: send one that memfd_create returned")
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            raise invalid("the descriptor is of a file: send one that memfd_create returned") from None
        if not seals & fcntl.F_SEAL_SHRINK:
            raise invalid(
                "the memfd may shrink under the daemon: make it with MFD_ALLOW_SEALING, and add F_SEAL_SHRINK"
            )
        if os.fstatvfs(fd).f_bsize > mmap.PAGESIZE:
            raise invalid("memory of huge pages (MFD_HUGETLB) is not accepted: its pages may be taken away")
        if nbytes is None:
            nbytes = at.st_size - offset
        if offset + nbytes > at.st_size or nbytes < 1:
            raise invalid(f"{nbytes} bytes at offset {offset} exceed a memfd of {at.st_size} bytes")
        require_span(wanted.layout, nbytes)
        if self._nbytes + nbytes > self._max_nbytes:
            raise ExhaustedError(
                f"{nbytes} bytes more would exceed the {self._max_nbytes} that may be handed over",
                code="exhausted",
            )
        # Pages that were never written would be charged to the daemon, which might be killed for that.
        if at.st_blocks * _STAT_BLOCK_NBYTES < nbytes:
            raise invalid(
                f"the memfd has {at.st_blocks * _STAT_BLOCK_NBYTES} of its {nbytes} bytes in memory: "
                "fill it, or call posix_fallocate, before you hand it over"
            )
        begin = offset % mmap.ALLOCATIONGRANULARITY
        try:
            mapped = mmap.mmap(fd, begin + nbytes, offset=offset - begin)
        except (OSError, ValueError, OverflowError) as error:
            raise invalid(f"the memfd cannot be mapped for reading and writing: {error}") from None
        self._nbytes += nbytes
        return np.frombuffer(mapped, np.uint8, nbytes, begin)

    async def _gone(self, handed: Handed) -> None:
        """Deregisters a region, and releases its memory.

        While that fails the memory stays mapped, because the agent may still touch it.
        """
        self.regions.pop(handed.name, None)
        again_s = _DEREGISTER_AGAIN_S
        while True:
            try:
                await handed.region.deregister()
                break
            except Exception as error:
                if self._closing.is_set():
                    self._kept.append(handed)
                    return
                if again_s == _DEREGISTER_AGAIN_S:
                    words = (
                        "memory %s stays mapped, and deregistering it is tried again, because it failed: %s"
                    )
                    logger().error(words, handed.name, error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), again_s)
            again_s = min(2 * again_s, _LONGEST_AGAIN_S)
        await self._release(handed)

    async def _release(self, handed: Handed) -> None:
        await self._let_go(handed.memory)
        self._names.discard(handed.name)
        self._tell(handed, False)

    def _tell(self, handed: Handed, has_come: bool) -> None:
        if self._on_change is None:
            return
        try:
            self._on_change(handed, has_come)
        except Exception as error:
            logger().error("kvxfer: the callback for memory %s failed: %r", handed.name, error)


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    news: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connection, resolve, loop, news)
    try:
        await news
    finally:
        loop.remove_reader(connection)


async def _line(connection: socket.socket, fds: list[int]) -> bytes | None:
    """Returns one line without its end, and adds received descriptors to `fds`; None if the process went.

    Raises
    ------
    UsageError
        The line is too long, or more bytes followed it.
    """
    line = bytearray()
    while True:
        try:
            part, new, flags, _ = socket.recv_fds(connection, MAX_LINE_NBYTES + 1, 4, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            await _readable(connection)
            continue
        fds.extend(new)
        if flags & socket.MSG_CTRUNC or len(fds) > 4:
            raise invalid("too many descriptors arrived: send one")
        if not part:
            return None
        line += part
        end = line.find(b"\n")
        if end >= 0 and end != len(line) - 1:
            raise invalid("more data came after the line: a connection hands over one memory")
        if end >= 0:
            return bytes(line[:end])
        if len(line) > MAX_LINE_NBYTES:
            raise invalid(f"the line is longer than {MAX_LINE_NBYTES} bytes")


async def _ended(connection: socket.socket) -> None:
    """Waits until the process shuts down its half of the connection, or sends anything."""
    while True:
        try:
            connection.recv(1)
            return
        except BlockingIOError:
            await _readable(connection)
        except OSError:
            return


def _answer(connection: socket.socket, document: dict[str, Any]) -> None:
    """Sends one line, which fits in an empty buffer; drops it if the process does not read, or has gone."""
    try:
        connection.send(json.dumps(document).encode() + b"\n", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError:
        pass


def _error(code: str, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message}}


def _peer_of(connection: socket.socket) -> tuple[int, int]:
    """Returns the process's pid and uid."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", told)
    return pid, uid


def _machine_nbytes() -> int:
    from kvxfer.memory.control_group import machine_nbytes, memory_limit_nbytes

    bounds = [nbytes for nbytes in (machine_nbytes().get("MemTotal"),) if nbytes]
    if (limit := memory_limit_nbytes()) is not None:
        bounds.append(limit[0])
    return min(bounds, default=1 << 56)
