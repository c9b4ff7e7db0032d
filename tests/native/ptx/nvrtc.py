"""Compiles our kernels to PTX with NVRTC, as for a driver or ptxas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


class NotHereError(Exception):
    """There is no NVRTC, or it does not support what was asked for."""


def ptx(source: Path, architecture: str, include_folders: Sequence[Path]) -> str:
    """Compiles a kernel's source with the options that kvxfer compiles it with; takes a second.

    Raises
    ------
    NotHereError
        NVRTC is not installed, or refuses the source; the message has its log.
    """
    nvrtc = _nvrtc()
    name = source.name.encode()
    program = _ask(nvrtc, "CreateProgram", source.read_bytes(), name, 0, [], [])
    options = [
        "--std=c++20",
        f"--gpu-architecture={architecture}",
        *(f"-I{each}" for each in include_folders),
    ]
    try:
        _ask(nvrtc, "CompileProgram", program, len(options), [option.encode() for option in options])
    except NotHereError as error:
        said = bytearray(_ask(nvrtc, "GetProgramLogSize", program))
        _ask(nvrtc, "GetProgramLog", program, said)
        raise NotHereError(f"{source} for {architecture}: {error}\n{said.decode().rstrip(chr(0))}") from error
    text = bytearray(_ask(nvrtc, "GetPTXSize", program))
    _ask(nvrtc, "GetPTX", program, text)
    return text.decode().rstrip("\0")


def check_is_here() -> None:
    """Raises `NotHereError` if NVRTC is missing."""
    _ask(_nvrtc(), "Version")


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise NotHereError(f"cuda-bindings is not installed ({error})") from error
    return nvrtc


def _ask(nvrtc: Any, name: str, *arguments: object) -> Any:
    try:
        status, *values = getattr(nvrtc, f"nvrtc{name}")(*arguments)
    except RuntimeError as error:  # the first call loads the library
        raise NotHereError(f"NVRTC is not found ({error})") from error
    if int(status) != 0:
        raise NotHereError(f"nvrtc{name}: {status}")
    return values[0] if len(values) == 1 else values
