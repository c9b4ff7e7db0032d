"""GPU kernels: how they are compiled, cached and loaded, and whether they can run here.

No CUDA package is imported before it is used, so these functions can be called on a machine without CUDA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvxfer.gpu.command_ring import CommandRing
    from kvxfer.gpu.shareable import shareable_memory
    from kvxfer.gpu.store_offer import StoreOffer, offer_stores
    from kvxfer.gpu.stream_wait import StreamWait

__all__ = [
    "CommandRing",
    "StoreOffer",
    "StreamWait",
    "include_path",
    "offer_stores",
    "shareable_memory",
    "store_ring_nbytes",
]


def _load(name: str) -> Any:
    # It needs the native module; other names here must work before a build.
    if name == "shareable_memory":
        from kvxfer.gpu.shareable import shareable_memory

        return shareable_memory
    if name == "StreamWait":
        from kvxfer.gpu.stream_wait import StreamWait

        return StreamWait
    if name == "CommandRing":
        from kvxfer.gpu.command_ring import CommandRing

        return CommandRing
    if name in ("StoreOffer", "offer_stores"):
        from kvxfer.gpu import store_offer

        return getattr(store_offer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def include_path() -> str:
    """Returns the include folder for compiling kernels that use ``kvxfer/device.cuh``.

    With that header a kernel can signal that pages are final (`kvxfer.Trigger`), start transfers
    (`CommandRing`) and store pages to a peer (`offer_stores`). The header includes no CUDA or C++ headers and
    needs no library: nvcc's ``-I``, NVRTC's ``--include-path``.
    """
    from kvxfer.gpu import sources

    return str(sources.ROOT / "include")


def store_ring_nbytes(num_stages: int = 4) -> int:
    """Returns the bytes of shared memory that a kernel needs for a ``kvxfer::StoreRing<num_stages>``.

    Bulk stores to the pages of `offer_stores` (``kvxfer::PageStores``) use this ring if the source pages lie
    in the GPU's memory. It has stages of 8 KiB; all but one are in flight. Give a launch this many bytes in
    addition to the kernel's other shared memory, starting at a multiple of 128. Beyond 48 KiB, CUDA requires
    a request (``CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES``).

    Raises
    ------
    ValueError
        Fewer than two stages: one is stored while others are loaded.
    """
    if num_stages < 2:
        raise ValueError(f"a ring needs two stages or more, not {num_stages}")
    # Equals sizeof (native/include/kvxfer/bulk_ring.h): the stages, and a barrier and a place for each.
    return num_stages * 8192 + sum(-(-num_stages * nbytes // 128) * 128 for nbytes in (8, 16))


if not TYPE_CHECKING:
    __getattr__ = _load  # for a type checker every name would be there, misspelled ones too
