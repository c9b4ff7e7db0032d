"""A plain loop of a library's own reads, and nothing of ours, where its headers and a C compiler are.

The programs are bench/native/NAME_loop.c. Both ends poll, with as many reads under way as the transport has.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

from kvxfer.bench.errors import BenchError

_SOURCES: Final = Path(__file__).resolve().parent.parent / "native"
_LIBRARIES: Final = {"libfabric": ("-lfabric",), "ucx": ("-lucp", "-lucs")}
# What it goes over: the first that the library has, as the transport does on a machine without RDMA.
_WAYS: Final = {"libfabric": (("net", "127.0.0.1"), ("tcp", "127.0.0.1")), "ucx": (("tcp",),)}
_WINDOW: Final = 64
_LIMIT_S: Final = 120.0


def is_there(transport: str) -> bool:
    """Whether there is one of this transport's library, and it can be compiled."""
    return transport in _LIBRARIES and bool(_program(transport))


def elapsed_ns(transport: str, page_nbytes: int, num_pages: int) -> int:
    """Returns how long it took to read all pages once, in random order; it has looked at every byte.

    Raises
    ------
    BenchError
        With the program's last words.
    """
    said = ""
    for way in _WAYS[transport]:
        command = [_program(transport), *way, *map(str, (page_nbytes, num_pages, _WINDOW, 1))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            raise BenchError(f"the plain loop of {transport} took more than {_LIMIT_S:g} s") from None
        if done.returncode == 0:
            return int(done.stdout.split()[-1])
        said = done.stderr.strip()[-500:]
    raise BenchError(f"the plain loop of {transport} failed: {said}")


@cache
def _program(transport: str) -> str:
    """Returns the program's path; "" where it cannot be made."""
    source, compiler = _SOURCES / f"{transport}_loop.c", shutil.which("cc")
    if compiler is None or not source.is_file():
        return ""
    folder = _folder()
    program = Path(folder.name) / transport
    command = [compiler, "-O2", str(source), "-o", str(program), *_LIBRARIES[transport]]
    return str(program) if subprocess.run(command, capture_output=True, check=False).returncode == 0 else ""


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kvxfer-bench-")
