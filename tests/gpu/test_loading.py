"""Kernels on a device."""

from __future__ import annotations

import gc

import pytest

from kvxfer.errors import UsageError
from kvxfer.gpu import availability, loading
from kvxfer.gpu.kernels import KERNELS

pytestmark = pytest.mark.gpu


def current_context() -> int:
    from cuda.bindings import driver

    status, context = driver.cuCtxGetCurrent()
    assert int(status) == 0
    return int(context)


def test_every_kernel_of_this_gpu_loads_and_the_threads_context_stays() -> None:
    device, _ = availability.check()
    before = current_context()
    loaded = [loading.load(kernel.name) for kernel in KERNELS if kernel.runs_on(device.architecture)]
    assert current_context() == before
    handles = {kernel.handle for kernel in loaded}
    assert 0 not in handles
    assert len(handles) == len(loaded)


def test_a_loaded_kernel_fits_its_launch_bounds() -> None:
    from cuda.bindings import driver

    loaded = loading.load("copy_vectors")
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
    status, nbytes = driver.cuFuncGetAttribute(attribute, driver.CUfunction(loaded.handle))
    assert int(status) == 0
    assert nbytes == 0  # nothing is spilled
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
    status, num_threads = driver.cuFuncGetAttribute(attribute, driver.CUfunction(loaded.handle))
    assert int(status) == 0
    assert num_threads >= 512


def test_kernels_are_unloaded_and_loaded_again() -> None:
    for _ in range(20):
        loaded = loading.load("copy_vectors")
        assert loaded.handle
        del loaded
        gc.collect()


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="there is no GPU 99: the driver offers"):
        loading.load("copy_vectors", 99)
