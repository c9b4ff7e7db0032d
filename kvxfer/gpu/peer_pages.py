"""GPU memory of another process, mapped into this one with an exported handle."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Final

from kvxfer import _native
from kvxfer._native import NativeError
from kvxfer.errors import translate

#: Kinds of handles, as in `_native.gpu_export`.
FABRIC: Final = 1
DESCRIPTOR: Final = 2
IPC: Final = 3
#: More than any GPU has: a larger number is not a valid size.
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
        Bytes of the whole allocation, as its owner made it.
    offset, nbytes
        The part of the allocation to use.

    Raises
    ------
    AgentError
        ``system``, with the driver's message: the GPU does not reach the other's memory, or the handle is of
        another machine, or of less memory than stated.
    UsageError
        ``unsupported``: there is no driver.
    """
    try:
        mapping = _native.GpuPeerMapping(gpu, kind, allocated, handle, fd)
    except NativeError as error:
        raise translate(error) from None
    return PeerPages(mapping, offset, nbytes)


class PeerPages:
    """Memory of another process that kernels of this process may read and write; made by `map_pages`.

    It is mapped until `close`, or until the end of the block as a context manager. If the owner's process
    ends or frees the memory, the mapping stays valid, but no one reads what is stored there.
    """

    def __init__(self, mapping: _native.GpuPeerMapping, offset: int, nbytes: int) -> None:
        self._mapping = mapping
        self._offset = offset
        #: Bytes that may be stored to.
        self.nbytes = nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Describes it as an array of bytes."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    @property
    def address(self) -> int:
        """Address of its first byte, for kernels (``kvxfer::PageStores``, ``store_page``, ``arrive``)."""
        address = self._mapping.address
        if address == 0:
            raise ValueError("the peer's pages are no longer mapped")
        return address + self._offset

    def close(self) -> None:
        """Waits until the device has finished all its work, then unmaps. Idempotent."""
        self._mapping.close()

    def __enter__(self) -> PeerPages:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
