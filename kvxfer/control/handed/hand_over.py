"""Hands memory of this process to the node's daemon, in one call: for programs that have no agent.

It needs neither a web framework nor an agent, only a socket, a memfd and a layout.
"""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvxfer.daemon_link.runtime_folder import runtime_folder
from kvxfer.errors import CODE_NAMES, KvxferError, PeerError, class_of, invalid
from kvxfer.layout.kv_layout import KVLayout


class _SharedMap(mmap.mmap):
    """A mapping that keeps the file descriptor of its memory."""

    fd: int

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # also while the interpreter ends
        close(self.fd)


def shared_array(
    shape: int | tuple[int, ...], dtype: DTypeLike = np.uint8, name: str = "kvxfer"
) -> NDArray[Any]:
    """Returns an array of zeros in memory that `hand_over` accepts.

    Raises
    ------
    OSError
        The system has no memory for it.
    """
    kind = np.dtype(dtype)
    shape = (shape,) if isinstance(shape, int) else shape
    nbytes = math.prod(shape) * kind.itemsize
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, max(nbytes, 1))  # so that the pages are charged to this process
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        mapped = _SharedMap(fd, max(nbytes, 1))
    except BaseException:
        os.close(fd)
        raise
    mapped.fd = fd
    return np.frombuffer(mapped, kind, math.prod(shape)).reshape(shape)


class HandedOver:
    """Memory that is a region of the daemon until `close` or the process's end. Made by `hand_over`.

    Attributes
    ----------
    region
        The name of the region.
    agent, incarnation, address
        The daemon's agent that has the region, and the address at which peers reach it.
    """

    def __init__(self, connection: socket.socket, memory: Any, told: dict[str, Any]) -> None:
        self._connection: socket.socket | None = connection
        self._memory = memory
        self.region = str(told["region"])
        self.agent = str(told["agent"])
        self.incarnation = str(told["incarnation"])
        self.address = str(told["address"])

    def __repr__(self) -> str:
        return f"<HandedOver {self.region!r} of {self.agent!r}>"

    def close(self, timeout_s: float | None = 10.0) -> None:
        """Takes the memory back: when this returns, the daemon touches no byte of it. Idempotent.

        Raises
        ------
        TimeoutError
            The daemon was told, but did not confirm in time. Do not use the memory for anything else.
        """
        connection, self._connection = self._connection, None
        if connection is None:
            return
        with connection:
            connection.settimeout(timeout_s)
            try:
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(4096):
                    pass
            except TimeoutError:
                raise
            except OSError:
                pass  # the daemon is gone, and its mapping with it
        self._memory = None

    def __enter__(self) -> HandedOver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def hand_over(
    memory: Any,
    layout: KVLayout,
    name: str,
    *,
    daemon: str | os.PathLike[str] | None = None,
    timeout_s: float = 10.0,
) -> HandedOver:
    """Hands memory to the node's daemon, which makes it a region named after `name`.

    Parameters
    ----------
    memory
        An array of `shared_array`, or a part of one; a memfd that is filled and sealed against shrinking; or
        a contiguous tensor on the daemon's GPU (``kvxfer serve --gpu``), which was allocated in
        `kvxfer.gpu.shareable_memory`.
    layout
        Where its elements lie, counted from the first byte of the array or the memfd.
    name
        At most 64 bytes, unique among all memory that the daemon was handed. The region's name is longer.
    daemon
        The daemon's folder, or its ``memory.sock``; None for the default place.
    timeout_s
        How long the daemon may take.

    Raises
    ------
    UsageError
        ``invalid-argument``: the memory is of another kind. ``unsupported``: memory of a GPU that no other
        process can keep mapped. Otherwise the daemon's own error.
    PeerError
        ``unreachable``: there is no daemon, or it does not answer. ``auth-failed``: it belongs to another
        user.
    """
    line = {"name": name, "layout": json.loads(layout.to_bytes())}
    path = _socket_of(daemon)
    if hasattr(memory, "__cuda_array_interface__"):
        from kvxfer.gpu.store_offer import offer_stores

        with offer_stores(memory) as offer:
            _, allocated, handle, fd, offset = offer.handle()
            told = {"kind": "descriptor"} if fd >= 0 else {"kind": "fabric", "handle": handle.hex()}
            line |= {"offset": offset, "nbytes": offer.nbytes}
            line["cuda_handle"] = {**told, "allocated_nbytes": allocated}
            return _handed(memory, line, [fd] if fd >= 0 else [], path, timeout_s)
    fd, offset, nbytes = (memory, 0, None) if isinstance(memory, int) else _place_of(memory)
    line["offset"] = offset
    if nbytes is not None:
        line["nbytes"] = nbytes
    return _handed(memory, line, [fd], path, timeout_s)


def _handed(memory: Any, line: dict[str, Any], fds: list[int], path: Path, timeout_s: float) -> HandedOver:
    """Sends a line with its descriptors, and returns the region that the daemon has made."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(path))
            _require_own(connection, path)
            encoded = json.dumps(line).encode() + b"\n"
            try:
                sent = socket.send_fds(connection, [encoded], fds)
                connection.sendall(encoded[sent:])
            except (BrokenPipeError, ConnectionResetError):
                pass  # the daemon refuses before it has read everything, and then says why
            told = _answer(connection)
        except OSError as error:
            raise PeerError(f"the daemon at {path} does not answer: {error}", code="unreachable") from None
        connection.settimeout(None)
        return HandedOver(connection, memory, told)
    except BaseException:
        connection.close()
        raise


def _answer(connection: socket.socket) -> dict[str, Any]:
    line = bytearray()
    while not line.endswith(b"\n"):
        part = connection.recv(4096)
        if not part or len(line) > 1 << 20:
            raise PeerError("the daemon ended the connection", code="unreachable")
        line += part
    told: dict[str, Any] = json.loads(line)
    if (error := told.get("error")) is not None:
        code = str(error.get("code"))
        number = next((number for number, word in CODE_NAMES.items() if word == code), 0)
        kind = class_of(number) if number else KvxferError
        raise kind(str(error.get("message")), code=code)
    return told


def _place_of(memory: NDArray[Any]) -> tuple[int, int, int]:
    """Returns the descriptor of an array's memory, and the range of the array's bytes in it."""
    owner: Any = memory
    while isinstance(owner, np.ndarray):
        whole, owner = owner, owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    if not isinstance(owner, _SharedMap) or not memory.flags.c_contiguous:
        raise invalid("memory must be an array made by shared_array, a contiguous part of one, or a memfd")
    offset = memory.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    return owner.fd, offset, memory.nbytes


def _socket_of(daemon: str | os.PathLike[str] | None) -> Path:
    path = runtime_folder() if daemon is None else Path(daemon)
    return path if path.suffix == ".sock" else path / "memory.sock"


def _require_own(connection: socket.socket, path: Path) -> None:
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid = struct.unpack("3i", told)[1]
    if uid not in (0, os.getuid()):
        raise PeerError(
            f"the daemon at {path} runs as user {uid}, who could read the memory", code="auth-failed"
        )
