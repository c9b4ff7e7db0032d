"""Queries NVIDIA's driver: its version, and the GPUs that this process may use.

Uses ctypes, because this must work without any CUDA package.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from kvxfer.gpu import architecture

_NAME = "libcuda.so.1"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
# CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
_MAJOR, _MINOR = 75, 76
_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU; ``index`` counts those that this process may see."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_nbytes: int

    @property
    def architecture(self) -> str:
        """The architecture that its kernels are compiled for, e.g. ``"sm_90a"``."""
        return architecture.for_capability(*self.capability)


@dataclass(frozen=True, slots=True)
class Driver:
    """State of the driver.

    Attributes
    ----------
    version
        The newest CUDA version that it supports: major, minor; (0, 0) if it could not be queried.
    devices
        Empty if something failed.
    failure, change
        What is wrong, and what to do about it; ``""`` if nothing is.
    """

    version: tuple[int, int] = (0, 0)
    devices: tuple[Device, ...] = ()
    failure: str = ""
    change: str = ""


class _FailedError(Exception):
    """A call failed; ``status`` is CUDA's number, 0 for none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def look() -> Driver:
    """Queries the driver. The first call starts it in this process, which takes up to a second."""
    try:
        library = ctypes.CDLL(_NAME)
    except OSError as error:
        if "No such file" not in str(error):
            return Driver(
                failure=f"{_NAME} cannot be loaded: {error}", change="install NVIDIA's driver again"
            )
        return Driver(
            failure=f"{_NAME} was not found, so there is no NVIDIA driver",
            change="install NVIDIA's driver, or start the container with --gpus all",
        )
    version = (0, 0)
    try:
        number = ctypes.c_int()
        _call(library, "cuDriverGetVersion", ctypes.byref(number))
        version = (number.value // 1000, number.value % 1000 // 10)
        _call(library, "cuInit", ctypes.c_uint(0))
        _call(library, "cuDeviceGetCount", ctypes.byref(number))
        devices = tuple(_device(library, index) for index in range(number.value))
    except _FailedError as error:
        if error.status == _NO_DEVICE:
            return _without_devices(version)
        return Driver(version, failure=str(error), change="run nvidia-smi and see what it reports")
    if not devices:
        return _without_devices(version)
    return Driver(version, devices)


def device_of(address: int) -> int | None:
    """Returns the index of the GPU that an address belongs to; None if the driver does not know it."""
    ordinal = ctypes.c_int(-1)
    try:
        library = ctypes.CDLL(_NAME)
        _call(
            library,
            "cuPointerGetAttribute",
            ctypes.byref(ordinal),
            ctypes.c_int(_DEVICE_ORDINAL),
            ctypes.c_uint64(address),
        )
    except (OSError, _FailedError):
        return None
    return None if ordinal.value < 0 else ordinal.value


def _without_devices(version: tuple[int, int]) -> Driver:
    return Driver(
        version,
        failure="the NVIDIA driver offers no GPU to this process",
        change="check CUDA_VISIBLE_DEVICES, the container's --gpus and nvidia-smi",
    )


def _device(library: ctypes.CDLL, index: int) -> Device:
    handle, number, nbytes = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(256)
    _call(library, "cuDeviceGet", ctypes.byref(handle), ctypes.c_int(index))
    _call(library, "cuDeviceGetName", name, ctypes.c_int(len(name)), handle)
    _call(library, "cuDeviceTotalMem_v2", ctypes.byref(nbytes), handle)
    capability = []
    for attribute in (_MAJOR, _MINOR):
        _call(library, "cuDeviceGetAttribute", ctypes.byref(number), ctypes.c_int(attribute), handle)
        capability.append(number.value)
    return Device(index, name.value.decode(errors="replace"), (capability[0], capability[1]), nbytes.value)


def _call(library: ctypes.CDLL, name: str, *arguments: Any) -> None:
    try:
        status = getattr(library, name)(*arguments)
        if status == 0:
            return
        words = ctypes.c_char_p()
        library.cuGetErrorString(status, ctypes.byref(words))
    except AttributeError as error:
        raise _FailedError(f"the NVIDIA driver is too old: {error}") from error
    what = (words.value or b"no words for it").decode(errors="replace")
    raise _FailedError(f"the NVIDIA driver failed in {name} with {status}: {what}", status)
