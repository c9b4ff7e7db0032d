"""A compiled kernel, in memory and as a self-describing file."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# The first line of a file is JSON; a line is never longer.
_MAX_HEAD_NBYTES: Final = 1024
# A kernel takes a twentieth of it. Larger files are not ours.
_MAX_NBYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Cubin:
    """One kernel's machine code for one architecture.

    Attributes
    ----------
    kernel, architecture
        E.g. ``"copy_vectors"`` and ``"sm_90a"``.
    source_key
        `kvxfer.gpu.sources.key_of`.
    compiler
        NVRTC's version: major, minor. A driver loads cubins from compilers of its own major version of CUDA
        or an earlier one.
    code
        An ELF file.
    """

    kernel: str
    architecture: str
    source_key: str
    compiler: tuple[int, int]
    code: bytes

    def to_bytes(self) -> bytes:
        """Returns the file's content: a line of JSON with description, length and hash; then the code."""
        head = {
            "kernel": self.kernel,
            "architecture": self.architecture,
            "source_key": self.source_key,
            "compiler": list(self.compiler),
            "code_nbytes": len(self.code),
            "code_sha256": hashlib.sha256(self.code).hexdigest(),
        }
        return json.dumps(head).encode() + b"\n" + self.code


def read(
    path: Path, kernel: str, architecture: str, source_key: str, *, uid: int | None = None
) -> Cubin | None:
    """Reads what `Cubin.to_bytes` made.

    Parameters
    ----------
    path, kernel, architecture, source_key
        The file, and what it must contain.
    uid
        The required owner of the file, if any, because a GPU of this process runs the code.

    Returns
    -------
    Cubin or None
        None if there is no such file, or if it is incomplete, altered, another user's, or of another kernel.
    """
    try:
        with path.open("rb") as file:
            if uid is not None and os.fstat(file.fileno()).st_uid not in (uid, 0):
                return None
            head_line = file.readline(_MAX_HEAD_NBYTES)
            code = file.read(_MAX_NBYTES)
    except OSError:
        return None
    try:
        head = json.loads(head_line)
        major, minor = head["compiler"]
        cubin = Cubin(
            head["kernel"], head["architecture"], head["source_key"], (int(major), int(minor)), code
        )
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        return None
    # Compare all at once: a file that differs in head or code is not what `Cubin.to_bytes` writes.
    if (cubin.kernel, cubin.architecture, cubin.source_key) != (kernel, architecture, source_key):
        return None
    return cubin if cubin.to_bytes() == head_line + code else None
