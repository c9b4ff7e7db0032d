"""Kernels on a device, as handles for the native module."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from kvxfer.errors import UsageError
from kvxfer.gpu import availability
from kvxfer.gpu.kernels import KERNELS, kernel_of
from kvxfer.gpu.origin import Origin, find

# cuFuncLoad came with CUDA 12.4.
_CAN_LOAD_FUNCTIONS = (12, 4)


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel on a device; it is unloaded with this object.

    Attributes
    ----------
    name, device_index
        What was asked for.
    handle
        The driver's CUfunction, in the device's primary context.
    origin
        Where its cubin is from.
    """

    name: str
    device_index: int
    handle: int
    origin: Origin
    # What the handle belongs to.
    _code: Any = field(repr=False)


def load(name: str, device_index: int = 0) -> LoadedKernel:
    """Loads a kernel onto a device, compiled first where that is still to be done.

    All of it is on the device when this returns. The calling thread's current context is as before then, and
    a graph that is captured meanwhile takes no harm.

    Raises
    ------
    UsageError
        ``unsupported``: there is no such kernel, no such device, or the one does not run on the other.
    """
    kernel = kernel_of(name)
    device, driver_version = availability.check(device_index)
    origin, cubin = find(kernel, device.architecture, driver_version)

    from cuda.bindings import driver
    from cuda.core import Device, ObjectCode

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    mode = _checked(driver.cuThreadExchangeStreamCaptureMode(relaxed))
    before = _checked(driver.cuCtxGetCurrent())
    try:
        Device(device_index).set_current()
        code = ObjectCode.from_cubin(cubin.code, name=kernel.name)
        # A CUkernel is of no context; what cuLaunchKernel takes everywhere is its function in this one.
        function = _checked(driver.cuKernelGetFunction(code.get_kernel(kernel.entry).handle))
        # The driver would load it with its first launch, and wait for the whole device to do so: also for a
        # stream that waits for the transfer which that launch is for.
        if driver_version >= _CAN_LOAD_FUNCTIONS:
            _checked(driver.cuFuncLoad(function))
    finally:
        _checked(driver.cuCtxSetCurrent(before))
        _checked(driver.cuThreadExchangeStreamCaptureMode(mode))
    return LoadedKernel(name, device_index, int(function), origin, code)


def load_all(device_index: int = 0, *, bulk: bool = True) -> tuple[LoadedKernel | None, ...]:
    """Loads every kernel of a device, in the order of `KERNELS`; None for one that it does not run.

    Parameters
    ----------
    bulk
        Whether to load ``copy_bulk`` where it runs; for comparisons.

    Raises
    ------
    UsageError
        ``unsupported``: as `load`.
    """
    architecture = availability.check(device_index)[0].architecture
    return tuple(
        load(kernel.name, device_index)
        if kernel.runs_on(architecture) and (bulk or kernel.name != "copy_bulk")
        else None
        for kernel in KERNELS
    )


@functools.cache
def shared(device_index: int) -> tuple[LoadedKernel | None, ...]:
    """Returns every kernel of a device as `load_all` does, loaded once for all agents of this process."""
    return load_all(device_index)


def handles(kernels: tuple[LoadedKernel | None, ...]) -> tuple[int, int, int]:
    """Returns what the native module launches: a CUfunction for each of `KERNELS`, 0 for none."""
    vectors, bulk, convert = (0 if kernel is None else kernel.handle for kernel in kernels)
    return vectors, bulk, convert


def _checked(result: tuple[Any, ...]) -> Any:
    """Returns what a call of the driver gave.

    Raises
    ------
    UsageError
        ``unsupported``: it failed, with CUDA's word for it.
    """
    status, *values = result
    if int(status) != 0:
        raise UsageError(f"the NVIDIA driver fails to load a kernel: {status.name}", code="unsupported")
    return values[0] if values else None
