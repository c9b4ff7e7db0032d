"""Loads kernels onto a device, as handles for the native module."""

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
        The arguments of `load`.
    handle
        The driver's CUfunction, in the device's primary context.
    origin
        Where its cubin came from.
    """

    name: str
    device_index: int
    handle: int
    origin: Origin
    # The loaded code that owns the handle.
    _code: Any = field(repr=False)


def load(name: str, device_index: int = 0) -> LoadedKernel:
    """Loads a kernel onto a device; compiles it first if necessary.

    When this returns, all of the kernel is on the device. The calling thread's current context is unchanged,
    and a graph capture that is going on is not disturbed.

    Raises
    ------
    UsageError
        ``unsupported``: there is no such kernel or device, or the kernel does not run on the device.
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
        # A CUkernel belongs to no context, but cuLaunchKernel always accepts its function in this context.
        function = _checked(driver.cuKernelGetFunction(code.get_kernel(kernel.entry).handle))
        # Otherwise the driver would load it at its first launch, and would wait for the whole device first.
        # That includes a stream that itself waits for the transfer of that launch.
        if driver_version >= _CAN_LOAD_FUNCTIONS:
            _checked(driver.cuFuncLoad(function))
    finally:
        _checked(driver.cuCtxSetCurrent(before))
        _checked(driver.cuThreadExchangeStreamCaptureMode(mode))
    return LoadedKernel(name, device_index, int(function), origin, code)


def load_all(device_index: int = 0, *, bulk: bool = True) -> tuple[LoadedKernel | None, ...]:
    """Loads every kernel for a device, in the order of `KERNELS`; None for a kernel that cannot run there.

    Parameters
    ----------
    bulk
        Whether to load ``copy_bulk`` if it can run; for comparisons.

    Raises
    ------
    UsageError
        ``unsupported``: as in `load`.
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
    """Returns the same as `load_all`, loaded once for all agents of this process."""
    return load_all(device_index)


def handles(kernels: tuple[LoadedKernel | None, ...]) -> tuple[int, int, int]:
    """Returns the CUfunctions that the native module launches, one for each of `KERNELS`, 0 for none."""
    vectors, bulk, convert = (0 if kernel is None else kernel.handle for kernel in kernels)
    return vectors, bulk, convert


def _checked(result: tuple[Any, ...]) -> Any:
    """Returns the result of a driver call.

    Raises
    ------
    UsageError
        ``unsupported``: the call failed; the message has CUDA's error name.
    """
    status, *values = result
    if int(status) != 0:
        raise UsageError(f"the NVIDIA driver could not load a kernel: {status.name}", code="unsupported")
    return values[0] if values else None
