"""Offers of GPU memory into which kernels of another process store directly, without a lease or an agent."""

from __future__ import annotations

import os
import socket
import struct
from types import TracebackType
from typing import Any

from kvxfer import _native
from kvxfer._native import NativeError
from kvxfer.errors import UsageError, invalid, translate
from kvxfer.gpu.peer_pages import DESCRIPTOR, FABRIC, IPC, MOST_NBYTES, PeerPages, map_pages

# Magic and version, kind of handle, the allocation's bytes, offset of the memory in it, its bytes, handle.
_MESSAGE = struct.Struct("<4sIQQQ64s")
_MAGIC = b"kvs1"


def offer_stores(memory: Any) -> StoreOffer:
    """Returns an offer: each process that receives it may store into this memory while it has it mapped.

    There is no lease and no fence: an offer cannot be taken back, and kvxfer does not control what a kernel
    of the other process stores, or when. So offer separate memory, and never blocks on which you grant
    leases.

    Parameters
    ----------
    memory
        A contiguous tensor on a GPU in memory of `shareable_memory`, or in other memory that a descriptor or
        a fabric handle exports. A mapping keeps such memory alive: you may free it here at any time, and
        later stores then have no visible effect. The other process can store to the whole allocation (pieces
        of 2 MiB, which may hold other tensors).

    Raises
    ------
    UsageError
        ``unsupported``: it is not GPU memory, there is no driver, or it is memory that could be freed during
        the other process's stores (from cudaMalloc).
    """
    from kvxfer.layout.tensor import view

    seen = view(memory)
    if seen.gpu is None:
        raise UsageError(
            "stores can be offered only into GPU memory, and this is host memory: share it with kvxfer.Pool",
            code="unsupported",
        )
    nbytes = seen.itemsize
    for size, stride in zip(reversed(seen.shape), reversed(seen.strides), strict=True):
        if size > 1 and stride != nbytes:
            raise invalid(
                "stores can be offered only into contiguous memory: pass the tensor that this is a view of"
            )
        nbytes *= size
    try:
        kind, base, allocated, handle, fd = _native.gpu_export(seen.address)
    except NativeError as error:
        raise translate(error) from None
    if kind == IPC:
        raise UsageError(
            "this memory is from cudaMalloc, and another process cannot keep it while this one frees it: "
            "allocate it in kvxfer.gpu.shareable_memory()",
            code="unsupported",
        )
    offset = seen.address - base
    if offset + nbytes > allocated:
        if fd >= 0:
            os.close(fd)
        raise UsageError(
            "this tensor lies in more than one allocation: offer parts that each lie in one",
            code="unsupported",
        )
    return StoreOffer(kind, allocated, offset, nbytes, handle, fd)


class StoreOffer:
    """An offer with which a process maps another's GPU memory to store there; made by `offer_stores`.

    Holds a descriptor until `close`, or as a context manager. It can be sent any number of times.
    """

    def __init__(self, kind: int, allocated: int, offset: int, nbytes: int, handle: bytes, fd: int) -> None:
        self._kind, self._allocated, self._offset = kind, allocated, offset
        self._handle, self._fd = handle, fd
        #: Bytes of the offered memory.
        self.nbytes = nbytes

    def __repr__(self) -> str:
        how = "fabric handle" if self._kind == FABRIC else "descriptor"
        return f"<StoreOffer of {self.nbytes} bytes by {how}>"

    def handle(self) -> tuple[int, int, bytes, int, int]:
        """Returns the arguments of `map_pages`: kind, the allocation's bytes, handle, descriptor, and offset.

        The offer still owns the descriptor (-1: none).
        """
        return self._kind, self._allocated, self._handle, self._fd, self._offset

    def send(self, sock: socket.socket) -> None:
        """Sends the offer over a connected unix socket; the other end calls `receive`.

        Raises
        ------
        OSError
            As the socket raises it.
        ValueError
            The offer is closed.
        """
        if self._kind == DESCRIPTOR and self._fd < 0:
            raise ValueError("the offer is closed")
        message = _MESSAGE.pack(_MAGIC, self._kind, self._allocated, self._offset, self.nbytes, self._handle)
        sent = socket.send_fds(sock, [message], [self._fd] if self._fd >= 0 else [])
        sock.sendall(message[sent:])

    @classmethod
    def receive(cls, sock: socket.socket) -> StoreOffer:
        """Receives an offer over a unix socket; blocks as the socket does.

        Raises
        ------
        UsageError
            ``invalid-argument``: the message is not an offer. ``unsupported``: it has another version.
        ConnectionError
            The other end is gone.
        """
        message, fds = b"", list[int]()
        try:
            while len(message) < _MESSAGE.size:
                part, came, *_ = socket.recv_fds(sock, _MESSAGE.size - len(message), 4)
                fds += came
                if not part:
                    raise ConnectionError("the process that offers its memory closed the socket")
                message += part
            magic, kind, allocated, offset, nbytes, handle = _MESSAGE.unpack(message)
            if magic != _MAGIC:
                raise UsageError(
                    f"the message is not an offer of this version of kvxfer: it begins with {magic!r}",
                    code="unsupported",
                )
            if (
                kind not in (FABRIC, DESCRIPTOR)
                or len(fds) != (kind == DESCRIPTOR)
                or not 0 < nbytes <= allocated <= MOST_NBYTES
                or offset > allocated - nbytes
            ):
                raise invalid(
                    f"the message is not a valid offer: kind {kind} with {len(fds)} descriptors, {nbytes} "
                    f"bytes at offset {offset} of {allocated}"
                )
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return cls(kind, allocated, offset, nbytes, handle, fds[0] if fds else -1)

    def map(self, gpu: int = 0) -> PeerPages:
        """Maps the memory for kernels of this process on one of its GPUs.

        Raises
        ------
        AgentError
            ``system``, with the driver's words: the GPU does not reach the other's memory, the handle is of
            another machine, or of less memory than it says.
        UsageError
            ``unsupported``: there is no driver.
        ValueError
            The offer is closed.
        """
        if self._kind == DESCRIPTOR and self._fd < 0:
            raise ValueError("the offer is closed")
        return map_pages(
            gpu, self._kind, self._allocated, self._handle, self._fd, offset=self._offset, nbytes=self.nbytes
        )

    def close(self) -> None:
        """Closes its descriptor. Existing mappings stay. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> StoreOffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
