"""Makes arrays, which an agent can register, of memory for which SGLang gives only an address."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

_DLPACK_CUDA: Final = 2


def memory_at(address: int, shape: Sequence[int], strides: Sequence[int], gpu: int | None) -> Any:
    """Returns an array of the bytes at an address, with a shape and strides in bytes. Copies nothing.

    The engine owns the memory and must keep it until the region is deregistered.

    Parameters
    ----------
    gpu
        The index of the GPU that holds the memory; None for host memory.
    """
    if gpu is not None:
        return DeviceMemory(address, tuple(shape), tuple(strides), gpu)
    nbytes = 1 + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    flat = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
    return np.lib.stride_tricks.as_strided(flat, shape, strides)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on a GPU, exposed by ``__cuda_array_interface__``."""

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
