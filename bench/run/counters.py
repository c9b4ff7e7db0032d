"""Counts what moves take of the processors at both ends: from outside, so that workers run no code for it."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Final

from kvxfer.bench.run.channel import Message

#: Figure -> type (PERF_TYPE_HARDWARE, PERF_TYPE_SOFTWARE) and number of the kernel's event, as in its
#: perf_event.h.
EVENTS: Final = {
    "processor_us": (1, 1),  # PERF_COUNT_SW_TASK_CLOCK, ns
    "switches": (1, 3),  # PERF_COUNT_SW_CONTEXT_SWITCHES
    "cycles": (0, 0),  # PERF_COUNT_HW_CPU_CYCLES
    "instructions": (0, 1),  # PERF_COUNT_HW_INSTRUCTIONS
}
_SYSCALLS: Final = {"x86_64": 298, "aarch64": 241}
# PERF_ATTR_SIZE_VER1; a thread that starts later is counted too (inherit); what a hypervisor does is not.
_ATTR_NBYTES: Final = 72
_INHERIT, _EXCLUDE_HV = 1 << 1, 1 << 6
# PERF_FORMAT_TOTAL_TIME_ENABLED, PERF_FORMAT_TOTAL_TIME_RUNNING: fewer counters than events take turns.
_READ_FORMAT: Final = 3
_CLOSE_ON_EXEC: Final = 8
_WHY: Final = {
    errno.ENOENT: "this machine counts none (virtual machines often do not)",
    errno.EOPNOTSUPP: "this machine counts none (virtual machines often do not)",
    errno.EACCES: "not permitted: set kernel.perf_event_paranoid to 1, or be root",
    errno.EPERM: "not permitted: set kernel.perf_event_paranoid to 1, or be root; a container may forbid it",
    errno.ENOSYS: "this kernel has no perf_event_open",
}


class Counters:
    """The sums of some windows of time, over all threads of some processes, kernel code included.

    Attributes
    ----------
    not_counted
        Figure -> why it has no value.
    """

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self.not_counted: dict[str, str] = {}

    @contextmanager
    def counting(self, *processes: int) -> Iterator[None]:
        """Counts what these processes do within the block."""
        with ExitStack() as opened:
            events = {name: list(self._opened(name, processes, opened)) for name in EVENTS}
            yield
            for name, numbers in events.items():
                self._sums[name] += sum(map(_read, numbers))

    def forget(self) -> None:
        """Drops the sums so far, as those of a warm-up."""
        self._sums.clear()

    def figures(self, count: int) -> Message:
        """Returns each figure's part in one of ``count`` moves; without those that were not counted."""
        found = {name: self._sums[name] / count for name in EVENTS if name not in self.not_counted}
        if "processor_us" in found:
            found["processor_us"] /= 1e3
        return found

    def _opened(self, name: str, processes: Sequence[int], opened: ExitStack) -> Iterator[int]:
        for process in processes:
            for thread in _threads(process):
                if name in self.not_counted:
                    return
                try:
                    number = _open(*EVENTS[name], int(thread.name))
                except ProcessLookupError:
                    continue  # the thread has ended since it was listed
                except OSError as error:
                    self.not_counted[name] = _WHY.get(error.errno or 0, error.strerror or str(error))
                    return
                opened.callback(os.close, number)
                yield number


def counted(counters: Counters | None, *processes: int) -> AbstractContextManager[None]:
    """Returns a block in which ``counters``, if there are any, count what the processes do."""
    return nullcontext() if counters is None else counters.counting(*processes)


def _threads(process: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{process}/task").iterdir())
    except FileNotFoundError:
        return []  # it has ended, and whoever waits for its reply says how


def _open(kind: int, event: int, thread: int) -> int:
    """Returns the number of the file that counts an event of a thread from now on."""
    call = _SYSCALLS.get(platform.machine())
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    attributes = struct.pack(
        "=IIQQQQQ", kind, _ATTR_NBYTES, event, 0, 0, _READ_FORMAT, _INHERIT | _EXCLUDE_HV
    ).ljust(_ATTR_NBYTES, b"\0")
    libc = ctypes.CDLL(None, use_errno=True)
    number: int = libc.syscall(call, attributes, thread, -1, -1, _CLOSE_ON_EXEC)
    if number < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return number


def _read(number: int) -> int:
    """Returns an event's count; for the whole time, if it shared its counter with others."""
    count, enabled, running = struct.unpack("=QQQ", os.read(number, 24))
    return round(count * enabled / running) if running else 0
