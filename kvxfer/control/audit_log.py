"""The audit log: one line of JSON for each change: who, what, when, and the result. It is only appended to.

If there is no room for a change's line, the change is refused beforehand. If a line still cannot be written,
it is kept in memory and written first once there is room; until then no change is made.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvxfer.control.problems import Refusal
from kvxfer.log import logger

#: Size at which a new file is begun, and how many old files are kept.
MAX_NBYTES: Final = 16 * 1024 * 1024
NUM_KEPT: Final = 8
# Room for the lines of changes that are in progress: some thousands.
_LEAST_FREE_NBYTES: Final = 1 << 20


class AuditLog:
    """The file ``audit.log`` and its older parts; ``audit.log.1`` is the newest of these."""

    def __init__(self, path: Path, max_nbytes: int = MAX_NBYTES, kept: int = NUM_KEPT) -> None:
        self._path = path
        self._max_nbytes = max_nbytes
        self._kept = kept
        self._unwritten = bytearray()
        #: Called when a change is refused; must not block.
        self.on_refused: Callable[[], object] = lambda: None
        self._is_closed = False
        self._file = self._open()

    def close(self) -> None:
        """Closes the file. Idempotent."""
        self._is_closed = True
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    @property
    def fault(self) -> str:
        """Why changes are refused now; ``""`` if they are not."""
        try:
            if self._file < 0 and not self._is_closed:
                self._file = self._open()  # a new file could not be made before
            free = os.fstatvfs(self._file)
            if free.f_bavail * free.f_frsize < _LEAST_FREE_NBYTES:
                raise OSError(f"less than {_LEAST_FREE_NBYTES >> 20} MiB are free")
            self._write()
        except OSError as error:
            return f"the audit log cannot be written ({self._path}: {error})"
        return ""

    def require_room(self) -> None:
        """Refuses a change whose line could not be written.

        Raises
        ------
        Refusal
            ``unavailable``.
        """
        if fault := self.fault:
            self.on_refused()
            raise Refusal("unavailable", f"changes are refused while {fault}")

    def append(self, line: dict[str, Any]) -> None:
        """Writes a line; if that fails, keeps it for later."""
        self._unwritten += json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            self._write()
        except OSError as error:
            logger().error("the audit log %s cannot be written: %s", self._path, error)

    def _write(self) -> None:
        while self._unwritten:
            if os.fstat(self._file).st_size >= self._max_nbytes:
                self._rotate()
            # The file is open with O_APPEND. If only a part of a line was written, the rest follows here.
            del self._unwritten[: os.write(self._file, self._unwritten)]

    def _rotate(self) -> None:
        for number in range(self._kept - 1, 0, -1):
            older = self._numbered(number)
            if older.exists():
                older.replace(self._numbered(number + 1))
        self._path.replace(self._numbered(1))
        os.close(self._file)
        self._file = -1
        self._file = self._open()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def _open(self) -> int:
        return os.open(
            self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
