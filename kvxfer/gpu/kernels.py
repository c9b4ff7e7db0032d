"""The list of kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvxfer.errors import UsageError
from kvxfer.gpu.architecture import sm_of


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: a file, a function in it, and where it can run.

    Attributes
    ----------
    name
        As in native/gpu/make_job.h, e.g. ``"copy_vectors"``.
    least_sm
        The least compute capability, times ten.
    """

    name: str
    least_sm: int

    @property
    def source(self) -> str:
        """Its file, relative to ``native``."""
        return f"gpu/{self.name}.cu"

    @property
    def entry(self) -> str:
        """Its symbol in a cubin."""
        return f"kvxfer_{self.name}"

    def runs_on(self, architecture: str) -> bool:
        return sm_of(architecture) >= self.least_sm


#: In the order of native/gpu/make_job.h.
KERNELS: Final = (Kernel("copy_vectors", 80), Kernel("copy_bulk", 90), Kernel("convert", 80))


def kernel_of(name: str) -> Kernel:
    """Returns the kernel of a name.

    Raises
    ------
    UsageError
        ``unsupported``: there is none.
    """
    for kernel in KERNELS:
        if kernel.name == name:
            return kernel
    known = ", ".join(kernel.name for kernel in KERNELS)
    raise UsageError(f"there is no GPU kernel {name!r}; there are {known}", code="unsupported")


def check_runs_on(kernel: Kernel, architecture: str) -> None:
    """Raises `UsageError` (``unsupported``) if a kernel cannot run on an architecture."""
    if not kernel.runs_on(architecture):
        raise UsageError(
            f"the GPU kernel {kernel.name} needs sm_{kernel.least_sm} or later, but this GPU is "
            f"{architecture}",
            code="unsupported",
        )
