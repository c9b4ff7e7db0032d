"""The kernels' source files in an installation, and the keys that identify them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Final

from kvxfer.errors import UsageError
from kvxfer.gpu.kernels import Kernel

# In a wheel they are in the package; in a working tree they are beside it.
_PLACES: Final = (Path(__file__).parent / "native", Path(__file__).parents[2] / "native")
ROOT: Final = next((place for place in _PLACES if (place / "gpu").is_dir()), _PLACES[0])
# Include folders, in this order. NVRTC has no standard library; gpu/rtc replaces it.
INCLUDE_FOLDERS: Final = ("gpu/rtc", ".", "include")

_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def files_of(kernel: Kernel) -> dict[str, bytes]:
    """Returns a kernel's source and every header that it can include, by their paths below `ROOT`.

    Includes are followed under any ``#if``, so there may be a file too many. Files that are not found are
    NVRTC's own, or NVRTC reports them as errors.

    Raises
    ------
    UsageError
        ``unsupported``: this installation has no sources.
    """
    found: dict[str, bytes] = {}
    to_read = [kernel.source]
    while to_read:
        name = to_read.pop()
        if name in found:
            continue
        try:
            found[name] = (ROOT / name).read_bytes()
        except OSError as error:
            raise UsageError(
                f"the source of the GPU kernel {kernel.name} cannot be read ({error}): reinstall kvxfer",
                code="unsupported",
            ) from error
        for quote, included in _INCLUDE.findall(found[name].decode(errors="replace")):
            folders = [str(Path(name).parent)] if quote == '"' else []
            for folder in (*folders, *INCLUDE_FOLDERS):
                if (ROOT / folder / included).is_file():
                    to_read.append(str(Path(folder) / included))
                    break
    return dict(sorted(found.items()))


def key_of(kernel: Kernel, architecture: str, options: str) -> str:
    """Returns a hexadecimal key of sources, options and architecture.

    It identifies a cubin except for the compiler's version.
    """
    digest = hashlib.sha256()
    for name, text in (
        ("kernel", kernel.entry.encode()),
        ("architecture", architecture.encode()),
        ("options", options.encode()),
        *files_of(kernel).items(),
    ):
        # With their lengths, so that no two lists of texts give the same input.
        digest.update(f"{name} {len(text)}\n".encode())
        digest.update(text)
    return digest.hexdigest()
