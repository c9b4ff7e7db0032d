"""The audit log: one line of JSON for each change: who, what, when, and the result. It is only appended to.

If there is no room for a change's line, the change is refused beforehand. If a line still cannot be written,
it is kept in memory and written first once there is room; until then no change is made, except those that
take something back (`Need`).
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

from kvxfer.control.schema.problems import Refusal
from kvxfer.control.state.own_files import require_own_file
from kvxfer.control.state.reserve import LEAST_FREE_NBYTES, NO_ROOM, Reserve
from kvxfer.log import logger

#: Size at which a new file is begun, and how many old files are kept.
MAX_NBYTES: Final = 16 * 1024 * 1024
NUM_KEPT: Final = 8
# Lines that wait in memory for room on the disk: some thousands.
_MOST_WAITING_NBYTES: Final = 1 << 20

#: What a change needs of the disk. "room": room for its line and its state. "none": it takes something back
#: and stores nothing, so its line may wait in memory. "reserve": it takes something back and stores that, so
#: it may use the reserve.
Need = Literal["room", "none", "reserve"]


class AuditLog:
    """The file ``audit.log`` and its older parts; ``audit.log.1`` is the newest of these."""

    def __init__(
        self,
        path: Path,
        max_nbytes: int = MAX_NBYTES,
        kept: int = NUM_KEPT,
        reserve: Reserve | None = None,
    ) -> None:
        self._path = path
        self._reserve = reserve
        self._max_nbytes = max_nbytes
        self._kept = kept
        self._waiting = bytearray()
        #: Called when a change finds no room; must not block.
        self.on_refused: Callable[[], object] = lambda: None
        self._is_closed = False
        self._file = -1
        try:
            self._file = self._open()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            logger().error("the audit log %s cannot be made: %s", path, error)

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
            if self._reserve is not None and not self._reserve.take():
                raise OSError(errno.ENOSPC, str(self._reserve))
            if self._file < 0 and not self._is_closed:
                self._file = self._open()  # a new file could not be made before
            free = os.fstatvfs(self._file)
            if free.f_bavail * free.f_frsize < LEAST_FREE_NBYTES:
                raise OSError(errno.ENOSPC, f"less than {LEAST_FREE_NBYTES >> 20} MiB are free")
            self._write()
        except OSError as error:
            return f"the audit log cannot be written ({self._path}: {error.strerror or error})"
        return ""

    def require_room(self, need: Need = "room") -> None:
        """Refuses a change whose line could not be written.

        Raises
        ------
        Refusal
            ``unavailable``.
        """
        if not (fault := self.fault):
            return
        self.on_refused()
        if need == "reserve":
            if self._reserve is not None:
                self._reserve.give()
        elif need == "room" or len(self._waiting) >= _MOST_WAITING_NBYTES:
            raise Refusal("unavailable", f"changes are refused while {fault}")

    def append(self, line: dict[str, Any], need: Need = "room") -> None:
        """Writes a line; if that fails, keeps it for later."""
        text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        if need != "reserve" and len(self._waiting) + len(text) > 2 * _MOST_WAITING_NBYTES:
            return  # of a refused request; the changes themselves were bounded beforehand
        self._waiting += text
        if self._reserve is not None and not self._reserve.is_held and need != "reserve":
            return  # what is left on the disk is for others
        try:
            self._write()
        except OSError as error:
            logger().error("the audit log %s cannot be written: %s", self._path, error)

    def _write(self) -> None:
        if self._file < 0:
            self._file = self._open()
        while self._waiting:
            if os.fstat(self._file).st_size >= self._max_nbytes:
                self._rotate()
            # The file is open with O_APPEND. If only a part of a line was written, the rest follows here.
            del self._waiting[: os.write(self._file, self._waiting)]

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
        require_own_file(self._path)
        return os.open(
            self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
