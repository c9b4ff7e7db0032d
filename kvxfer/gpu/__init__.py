"""GPU kernels: which there are, how they are compiled, kept and loaded, and whether they can run here.

Nothing of CUDA is imported before it is used: all of this can be asked on a machine without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvxfer.gpu.shareable import shareable_memory
    from kvxfer.gpu.store_offer import StoreOffer, offer_stores

__all__ = ["StoreOffer", "include_path", "offer_stores", "shareable_memory"]


def __getattr__(name: str) -> Any:
    # It needs the native module, which what is asked before a build does not have.
    if name == "shareable_memory":
        from kvxfer.gpu.shareable import shareable_memory

        return shareable_memory
    if name in ("StoreOffer", "offer_stores"):
        from kvxfer.gpu import store_offer

        return getattr(store_offer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def include_path() -> str:
    """Returns the folder to compile kernels with that include ``kvxfer/device.cuh``.

    By that header a kernel says from inside that pages are final (`kvxfer.Trigger`), starts transfers
    (`kvxfer.CommandRing`) and stores pages to a peer (`offer_stores`). It includes nothing of
    CUDA or C++ and takes no library: nvcc's ``-I``, NVRTC's ``--include-path``.
    """
    from kvxfer.gpu import sources

    return str(sources.ROOT / "include")
