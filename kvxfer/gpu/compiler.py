"""Compiles kernels with NVRTC, CUDA's compiler library, which needs neither a GPU nor a driver."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any, Final

from kvxfer.errors import UsageError
from kvxfer.gpu import sources
from kvxfer.gpu.architecture import sm_of
from kvxfer.gpu.cubin import Cubin
from kvxfer.gpu.kernels import Kernel, check_runs_on

#: Options for every kernel; part of every cache key. With ``-v`` ptxas reports registers and spills.
OPTIONS: Final = "std=c++20 ptxas=-v"
#: How to install missing packages. The driver's CUDA version, as `nvidia-smi` shows it, decides which.
INSTALL: Final = "pip install kvxfer[gpu], or kvxfer[gpu-cu12] if the driver is for CUDA 12"


@dataclass(frozen=True, slots=True)
class Compilation:
    """A cubin with the compilers' log: registers, spills, warnings."""

    cubin: Cubin
    log: str


def check_installed() -> None:
    """Raises `UsageError` (``unsupported``) if cuda-core is missing; the first call takes half a second."""
    try:
        import cuda.bindings.nvrtc
        import cuda.core  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"cuda-core, which compiles and loads GPU kernels, is not installed ({error}): {INSTALL}",
            code="unsupported",
        ) from error


def version() -> tuple[int, int]:
    """Returns NVRTC's version: major, minor. The first call loads it.

    Raises
    ------
    UsageError
        ``unsupported``: NVRTC is missing; the message says what to install.
    """
    major, minor = _ask("nvrtcVersion")
    return int(major), int(minor)


def check_knows(architecture: str) -> None:
    """Raises `UsageError` (``unsupported``) if NVRTC is missing or too old for an architecture."""
    major, minor = version()
    known = [int(sm) for sm in _ask("nvrtcGetSupportedArchs")[0]]
    if sm_of(architecture) not in known:
        raise UsageError(
            f"NVRTC {major}.{minor} does not know {architecture}; the newest one that it knows is "
            f"sm_{max(known)}: {INSTALL}, with --upgrade",
            code="unsupported",
        )


def compile_kernel(kernel: Kernel, architecture: str) -> Compilation:
    """Compiles a kernel; takes one to three seconds.

    Raises
    ------
    UsageError
        ``unsupported``: the kernel is not for this architecture, NVRTC is missing or does not know the
        architecture, or compiling failed (the message has NVRTC's log).
    """
    check_runs_on(kernel, architecture)
    check_knows(architecture)
    from cuda.core import Program, ProgramOptions

    source_key = sources.key_of(kernel, architecture, OPTIONS)
    options = ProgramOptions(
        name=f"{kernel.name}.cu",
        arch=architecture,
        std="c++20",
        ptxas_options=["-v"],
        include_path=[str((sources.ROOT / folder).resolve()) for folder in sources.INCLUDE_FOLDERS],
    )
    log = io.StringIO()
    try:
        program = Program((sources.ROOT / kernel.source).read_text(), "c++", options)
        try:
            code = program.compile("cubin", logs=log).code
        finally:
            program.close()
    except Exception as error:  # cuda.core has an error class for each library, but no common one
        raise UsageError(
            f"NVRTC could not compile the GPU kernel {kernel.name} for {architecture}: "
            f"{error}\n{_plain(log.getvalue())}",
            code="unsupported",
        ) from error
    cubin = Cubin(kernel.name, architecture, source_key, version(), bytes(code))
    return Compilation(cubin, _plain(log.getvalue()))


def _ask(name: str) -> tuple[Any, ...]:
    """Calls a function of NVRTC without arguments; returns its results."""
    check_installed()
    from cuda.bindings import nvrtc

    try:
        status, *values = getattr(nvrtc, name)()
    except RuntimeError as error:  # the library is loaded with the first call
        raise UsageError(
            f"NVRTC, which compiles GPU kernels, was not found: {INSTALL}", code="unsupported"
        ) from error
    if int(status) != 0:
        raise UsageError(f"NVRTC failed in {name}: {status}", code="unsupported")
    return tuple(values)


def _plain(log: str) -> str:
    # The log ends with the zero bytes of C strings.
    return log.replace("\0", "").strip()
