"""Cubins that are part of an installation, so that most GPUs need no compiler.

`python -m kvxfer.gpu.prebuilt` compiles them into the package's own folder; `make wheel` does that before it
packs. Files that were made from other sources are not used.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from kvxfer.gpu import compiler, sources
from kvxfer.gpu import cubin as cubin_file
from kvxfer.gpu.cubin import Cubin
from kvxfer.gpu.kernels import KERNELS, Kernel

FOLDER: Final = Path(__file__).parent / "cubins"
#: A100 and all other GPUs of 8.x, H100 and H200, B200, B300, and RTX PRO 6000. Other GPUs need NVRTC.
ARCHITECTURES: Final = ("sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_120a")


def load(kernel: Kernel, architecture: str, source_key: str) -> Cubin | None:
    """Returns the cubin in this installation; None if there is none for these sources."""
    path = FOLDER / _name_of(kernel, architecture)
    return cubin_file.read(path, kernel.name, architecture, source_key)


def build(folder: Path = FOLDER, architectures: tuple[str, ...] = ARCHITECTURES) -> list[Path]:
    """Compiles every kernel for every architecture that it runs on; one to three seconds each.

    Keeps existing files from these sources and this compiler, and removes all other files.

    Raises
    ------
    UsageError
        ``unsupported``: NVRTC is missing, or does not compile them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for kernel in KERNELS:
        for architecture in architectures:
            if not kernel.runs_on(architecture):
                continue
            path = folder / _name_of(kernel, architecture)
            key = sources.key_of(kernel, architecture, compiler.OPTIONS)
            found = cubin_file.read(path, kernel.name, architecture, key)
            if found is None or found.compiler != compiler.version():
                path.write_bytes(compiler.compile_kernel(kernel, architecture).cubin.to_bytes())
            made.append(path)
    for path in set(folder.glob("*.cubin")) - set(made):
        path.unlink()
    return made


def _name_of(kernel: Kernel, architecture: str) -> str:
    return f"{kernel.name}-{architecture}.cubin"


if __name__ == "__main__":
    paths = build()
    total_nbytes = sum(path.stat().st_size for path in paths)
    sys.stdout.write(f"{FOLDER}: {len(paths)} cubins, {total_nbytes // 1024} KiB\n")
