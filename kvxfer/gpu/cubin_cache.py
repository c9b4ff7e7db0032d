"""The cache folder of cubins that were compiled on this machine, which all its processes share.

`cubins` in KVXFER_CACHE_DIR, or else in `kvxfer` in XDG_CACHE_HOME or in ~/.cache. A file's name contains
everything that its content depends on, and files appear whole. So no lock is needed: two processes that
compile the same kernel write the same file.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Final

from kvxfer.gpu import cubin as cubin_file
from kvxfer.gpu.cubin import Cubin
from kvxfer.log import logger

# Three kernels for each of five kinds of GPUs, in four versions: 6 MiB. Older files are removed.
_MAX_FILES: Final = 64

_refused: set[str] = set()


def base() -> Path | None:
    """Returns kvxfer's cache folder on this machine; None if the environment names no place."""
    if own := os.environ.get("KVXFER_CACHE_DIR"):
        return Path(own)
    # The XDG standard says to ignore relative paths.
    place = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not place.is_absolute():
        try:
            place = Path.home() / ".cache"
        except RuntimeError:
            return None
    return place / "kvxfer"


def folder() -> Path | None:
    """Returns the path of the cubin cache, which may not exist; None if the environment names no place."""
    place = base()
    return None if place is None else place / "cubins"


def load(kernel: str, architecture: str, source_key: str, compiler: tuple[int, int]) -> Cubin | None:
    """Returns a stored cubin; None if there is none that is complete and this user's."""
    place = folder()
    if place is None:
        return None
    path = place / _name_of(kernel, architecture, source_key, compiler)
    found = cubin_file.read(path, kernel, architecture, source_key, uid=os.geteuid())
    return found if found is not None and found.compiler == compiler else None


def store(cubin: Cubin) -> None:
    """Stores a cubin for later processes; if that fails, only logs it."""
    place = folder()
    if place is None:
        _refuse("", "neither KVXFER_CACHE_DIR nor XDG_CACHE_HOME nor HOME names a folder")
        return
    name = _name_of(cubin.kernel, cubin.architecture, cubin.source_key, cubin.compiler)
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(place / name, cubin.to_bytes())
        _trim(place)
    except OSError as error:
        _refuse(str(place), str(error))


def _name_of(kernel: str, architecture: str, source_key: str, compiler: tuple[int, int]) -> str:
    key = hashlib.sha256(f"{source_key} NVRTC {compiler[0]}.{compiler[1]}".encode()).hexdigest()
    return f"{kernel}-{architecture}-{key[:24]}.cubin"


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that other processes see whole or not at all."""
    fd, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _trim(place: Path) -> None:
    """Removes the oldest files beyond a limit, and half-written files of killed processes."""
    files = []
    for path in place.iterdir():
        try:
            files.append((path.stat().st_mtime_ns, path))
        except OSError:
            continue  # another process was faster
    for _, path in sorted(files)[:-_MAX_FILES]:
        if path.suffix in (".cubin", ".tmp"):
            path.unlink(missing_ok=True)


def _refuse(place: str, why: str) -> None:
    # Logged once for each folder, because this runs for every kernel.
    if place not in _refused:
        _refused.add(place)
        logger().warning(
            "compiled GPU kernels cannot be stored, so every process compiles them again: %s; set "
            "KVXFER_CACHE_DIR to a folder that can be written",
            why,
        )
