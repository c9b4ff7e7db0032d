"""Memory of which SGLang tells the address alone, as arrays that an agent registers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

_DLPACK_CUDA: Final = 2


def memory_at(address: int, shape: Sequence[int], strides: Sequence[int], gpu: int | None) -> Any:
    """Returns bytes at an address, with a shape and strides in bytes. Nothing is copied.

    The memory is the engine's, which keeps it until the region is deregistered.

    Parameters
    ----------
    gpu
        The index of the GPU on which it lies; None for memory of the host.
    """
    if gpu is not None:
        return DeviceMemory(address, tuple(shape), tuple(strides), gpu)
    nbytes = 1 + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    flat = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
    return np.lib.stride_tricks.as_strided(flat, shape, strides)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on a GPU, as ``__cuda_array_interface__`` has them."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    gpu: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "typestr": "|u1",
            "data": (self.address, False),
            "shape": self.shape,
            "strides": self.strides,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CUDA, self.gpu
