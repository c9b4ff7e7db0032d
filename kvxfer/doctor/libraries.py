"""Shared libraries: whether they load here, and their versions."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Library:
    """The result of loading a library by its name.

    Attributes
    ----------
    name
        The requested name, e.g. ``"libcuda.so.1"``.
    path
        The loaded file; ``""`` if none was loaded, or if the kernel does not name it.
    version
        As reported by the library or its file's name; ``""`` if unknown.
    failure
        The linker's message; ``""`` if it was loaded.
    """

    name: str
    path: str = ""
    version: str = ""
    failure: str = ""

    @property
    def loaded(self) -> bool:
        return not self.failure

    def __str__(self) -> str:
        if not self.loaded:
            return f"{self.name} is not found"
        return " ".join(part for part in (self.name, self.version, "is there", self.path) if part)


def load(name: str, version_of: Callable[[ctypes.CDLL], str] | None = None) -> Library:
    """Opens a shared library by its name, and asks for its version."""
    try:
        handle = ctypes.CDLL(name)
    except OSError as error:
        return Library(name, failure=str(error))
    path = _mapped_file(name)
    version = ""
    if version_of is not None:
        try:
            version = version_of(handle)
        except (AttributeError, OSError, ValueError):
            pass  # an older or newer library without this function
    return Library(name, path, version or _version_in(path))


def cuda() -> Library:
    """The CUDA driver's library; the version is the newest CUDA that the driver can serve."""
    return load("libcuda.so.1", _cuda_version)


def _cuda_version(handle: ctypes.CDLL) -> str:
    number = ctypes.c_int()
    if handle.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return ""
    return f"for CUDA {number.value // 1000}.{number.value % 1000 // 10}"


def _mapped_file(name: str) -> str:
    """Returns the file behind a loaded library, as this process's mappings name it."""
    stem = os.path.basename(name).partition(".so")[0] + ".so"  # noqa: PTH119 a name, not a path
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        path = line.partition("/")
        if path[1] and Path(path[2]).name.startswith(stem):
            return "/" + path[2]
    return ""


def _version_in(path: str) -> str:
    found = re.search(r"\.so\.(\d+(?:\.\d+)+)$", path)
    return found[1] if found else ""
