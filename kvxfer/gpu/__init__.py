"""GPU kernels: which there are, how they are compiled, kept and loaded, and whether they can run here.

Nothing of CUDA is imported before it is used: all of this can be asked on a machine without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvxfer.gpu.command_ring import CommandRing
    from kvxfer.gpu.shareable import shareable_memory
    from kvxfer.gpu.store_offer import StoreOffer, offer_stores

__all__ = [
    "CommandRing",
    "StoreOffer",
    "include_path",
    "offer_stores",
    "shareable_memory",
    "store_ring_nbytes",
]


def _load(name: str) -> Any:
    # It needs the native module, which what is asked before a build does not have.
    if name == "shareable_memory":
        from kvxfer.gpu.shareable import shareable_memory

        return shareable_memory
    if name == "CommandRing":
        from kvxfer.gpu.command_ring import CommandRing

        return CommandRing
    if name in ("StoreOffer", "offer_stores"):
        from kvxfer.gpu import store_offer

        return getattr(store_offer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def include_path() -> str:
    """Returns the folder to compile kernels with that include ``kvxfer/device.cuh``.

    By that header a kernel says from inside that pages are final (`kvxfer.Trigger`), starts transfers
    (`CommandRing`) and stores pages to a peer (`offer_stores`). It includes nothing of
    CUDA or C++ and takes no library: nvcc's ``-I``, NVRTC's ``--include-path``.
    """
    from kvxfer.gpu import sources

    return str(sources.ROOT / "include")


def store_ring_nbytes(num_stages: int = 4) -> int:
    """Returns how much shared memory a kernel wants that has a ``kvxfer::StoreRing<num_stages>``.

    That is what `offer_stores`' pages go through in bulk (``kvxfer::PageStores``) where they lie in the GPU's
    memory: stages of 8 KiB, of which all but one are on their way. In bytes; a launch gives that much beside
    what else the kernel has there, from a multiple of 128 on. Beyond 48 KiB CUDA wants to be asked for it
    (``CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES``).

    Raises
    ------
    ValueError
        Fewer than two stages: one is stored while others are loaded.
    """
    if num_stages < 2:
        raise ValueError(f"a ring has two stages or more, and this is {num_stages}")
    # As sizeof has it (native/include/kvxfer/bulk_ring.h): the stages, a barrier each, a place each.
    return num_stages * 8192 + sum(-(-num_stages * nbytes // 128) * 128 for nbytes in (8, 16))


if not TYPE_CHECKING:
    __getattr__ = _load  # for a type checker every name would be there, misspelled ones too
