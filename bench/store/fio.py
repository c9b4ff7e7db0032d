"""fio, where it is installed: reads and writes of files by direct I/O, and nothing of ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from kvxfer.bench.errors import BenchError
from kvxfer.bench.run.stats import GIB

Way = Literal["read", "write"]

_LIMIT_S: Final = 120.0
# Beyond 32 neither way was faster on any disk that this has run on.
_DEPTHS: Final = (1, 8, 16, 32)
_RINGS: Final = "io_uring"
# Threads that each have one read or write in the disk, as PageFiles has.
_THREADS: Final = "psync"


@dataclass(frozen=True, slots=True)
class Setting:
    """How many reads or writes are in the disk at a time, and by which of fio's engines."""

    engine: str
    depth: int

    def __str__(self) -> str:
        return f"{self.engine} {self.depth}"


@dataclass(frozen=True, slots=True)
class Run:
    """What fio says of a run; the processor time is that of its threads alone."""

    gb_s: float
    cpu_s_per_gib: float


class Fio:
    """Runs over files of equal size that are there. Each run moves each of their blocks ``passes`` times.

    They are the tier's own: a virtual disk may have one place in its host's cache and another not.

    Raises
    ------
    BenchError
        From any call, with the last words of fio.
    """

    def __init__(self, program: str, files: Sequence[Path], passes: int) -> None:
        self._program = program
        self._files = ":".join(map(str, files))
        self._num_files = len(files)
        self._each_nbytes = files[0].stat().st_size
        self._passes = passes

    def settings(self, page_nbytes: int) -> Iterator[Setting]:
        """Yields those that this machine permits; ring and threads do the same with one page at a time."""
        engines = [_THREADS]
        try:
            self._run("read", page_nbytes, Setting(_RINGS, 1), 1)
            engines.append(_RINGS)
        except BenchError:
            pass  # containers often forbid it
        for engine in engines:
            for depth in _DEPTHS:
                if depth * page_nbytes <= self._each_nbytes and (engine == _THREADS or depth > 1):
                    yield Setting(engine, depth)

    def run(self, way: Way, page_nbytes: int, setting: Setting) -> Run:
        """Reads or writes pages in random order."""
        return self._run(f"rand{way}", page_nbytes, setting, self._passes)

    def _run(self, how: str, page_nbytes: int, setting: Setting, passes: int) -> Run:
        jobs, depth = (setting.depth, 1) if setting.engine == _THREADS else (1, setting.depth)
        # Jobs have a part of each file each, so that together they take each page once a pass.
        part = self._each_nbytes // jobs // page_nbytes * page_nbytes
        command = [
            *(self._program, "--name=pages", f"--filename={self._files}", f"--ioengine={setting.engine}"),
            *(f"--rw={how}", f"--bs={page_nbytes}", f"--iodepth={depth}", f"--numjobs={jobs}"),
            *(f"--size={part * self._num_files}", f"--offset_increment={part}", f"--loops={passes}"),
            *("--direct=1", "--allow_file_create=0", "--thread", "--output-format=json"),
        ]
        words = " ".join(command)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
            # Notes may stand before the object.
            told = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        except subprocess.TimeoutExpired:
            raise BenchError(f"{words} took more than {_LIMIT_S:g} s") from None
        except (OSError, ValueError, KeyError) as error:
            raise BenchError(f"{words} failed: {error}") from None
        if done.returncode != 0 or any(job["error"] for job in told):
            raise BenchError(f"{words} failed: {done.stderr.strip()[-500:]}")
        of = how.removeprefix("rand")
        nbytes = sum(job[of]["io_bytes"] for job in told)
        runtime_ms = max(job[of]["runtime"] for job in told)
        cpu_s = sum((job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3 for job in told)
        return Run(nbytes / max(runtime_ms, 1) / 1e6, cpu_s / nbytes * GIB)


def find(program: str) -> tuple[str, str]:
    """Returns the program's path and version; ``("", why)`` if there is none to run.

    Raises
    ------
    BenchError
        The named program cannot be run.
    """
    if not program:
        return "", "it was not asked for"
    path = shutil.which(program)
    if path is None:
        return "", f"{program} is not in PATH: install the package fio (apt-get install fio)"
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10.0, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise BenchError(f"{os.fspath(path)} --version failed: {error}") from None
    return path, said.stdout.strip()
