"""Where a kernel's machine code comes from: the package, the cache, or the compiler."""

from __future__ import annotations

import enum

from kvxfer.errors import UsageError
from kvxfer.gpu import compiler, cubin_cache, prebuilt, sources
from kvxfer.gpu.cubin import Cubin
from kvxfer.gpu.kernels import Kernel, check_runs_on
from kvxfer.log import logger


class Origin(enum.StrEnum):
    """Where a cubin comes from, or would come from."""

    PREBUILT = "prebuilt"
    CACHED = "cached"
    #: Compiled by NVRTC, and then cached.
    COMPILED = "compiled"


def look(
    kernel: Kernel, architecture: str, driver_version: tuple[int, int] | None = None
) -> tuple[Origin, Cubin | None]:
    """Returns the origin of a kernel's cubin, and the cubin if it exists.

    Parameters
    ----------
    kernel, architecture
        The kernel, and the architecture to run it on.
    driver_version
        The CUDA version that the driver supports: it does not load code from a compiler of a later major
        version. None for no driver, when cubins are only inspected.

    Raises
    ------
    UsageError
        ``unsupported``: there is none, and it cannot be compiled; the message says what to install.
    """
    check_runs_on(kernel, architecture)
    key = sources.key_of(kernel, architecture, compiler.OPTIONS)
    found = prebuilt.load(kernel, architecture, key)
    if found is not None and _is_loaded_by(found.compiler, driver_version):
        return Origin.PREBUILT, found
    try:
        version = compiler.version()
    except UsageError as error:
        lacking = "is for a newer driver" if found else "is not part of this installation"
        raise UsageError(
            f"the GPU kernel {kernel.name} for {architecture} {lacking}, and {error.args[0]}", code=error.code
        ) from error
    if not _is_loaded_by(version, driver_version):
        raise UsageError(
            f"NVRTC {version[0]}.{version[1]} makes kernels that this driver does not load: update the "
            "driver, or pip install kvxfer[gpu-cu12] if it is for CUDA 12 (nvidia-smi shows that)",
            code="unsupported",
        )
    if (found := cubin_cache.load(kernel.name, architecture, key, version)) is not None:
        return Origin.CACHED, found
    compiler.check_knows(architecture)
    return Origin.COMPILED, None


def find(
    kernel: Kernel, architecture: str, driver_version: tuple[int, int] | None = None
) -> tuple[Origin, Cubin]:
    """Returns a kernel's cubin, compiled and cached if necessary; otherwise like `look`."""
    origin, found = look(kernel, architecture, driver_version)
    if found is None:
        compilation = compiler.compile_kernel(kernel, architecture)
        logger().info("compiled the GPU kernel %s for %s", kernel.name, architecture)
        found = compilation.cubin
        cubin_cache.store(found)
    return origin, found


def _is_loaded_by(compiler_version: tuple[int, int], driver_version: tuple[int, int] | None) -> bool:
    return driver_version is None or compiler_version[0] <= driver_version[0]
