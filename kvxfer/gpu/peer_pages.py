"""GPU memory of another process, mapped into this one by the handle that it was exported as."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Final

from kvxfer import _native
from kvxfer._native import NativeError
from kvxfer.errors import translate

#: Kinds of handles, as `_native.gpu_export` has them.
FABRIC: Final = 1
DESCRIPTOR: Final = 2
IPC: Final = 3
#: Of what a GPU has: a number beyond is none of a size.
MOST_NBYTES: Final = 1 << 48


def map_pages(
    gpu: int, kind: int, allocated: int, handle: bytes, fd: int, *, offset: int, nbytes: int
) -> PeerPages:
    """Maps an allocation for kernels of this process on one of its GPUs.

    Parameters
    ----------
    kind
        `FABRIC` (then `handle` has its 64 bytes) or `DESCRIPTOR` (then `fd`, which stays the caller's).
    allocated
        Of the whole allocation, as its owner made it.
    offset, nbytes
        Which part of it is meant; within it.

    Raises
    ------
    AgentError
        ``system``, with the driver's words: the GPU does not reach the other's memory, the handle is of
        another machine, or of less memory than it says.
    UsageError
        ``unsupported``: there is no driver.
    """
    try:
        mapping = _native.GpuPeerMapping(gpu, kind, allocated, handle, fd)
    except NativeError as error:
        raise translate(error) from None
    return PeerPages(mapping, offset, nbytes)


class PeerPages:
    """Memory of another process, which kernels of this one may read and write; made by `map_pages`.

    Mapped until `close`, or as a context manager, whatever becomes of its owner: if that process ends or
    frees the memory, stores go where nobody looks.
    """

    def __init__(self, mapping: _native.GpuPeerMapping, offset: int, nbytes: int) -> None:
        self._mapping = mapping
        self._offset = offset
        #: How much of it may be stored to.
        self.nbytes = nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What it is as an array of bytes."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    @property
    def address(self) -> int:
        """Of its first byte, for kernels (``kvxfer::PageStores``, ``store_page``, ``arrive``)."""
        address = self._mapping.address
        if address == 0:
            raise ValueError("the peer's pages are not mapped any more")
        return address + self._offset

    def close(self) -> None:
        """Waits until the device has done all that it was given, then unmaps. Idempotent."""
        self._mapping.close()

    def __enter__(self) -> PeerPages:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
