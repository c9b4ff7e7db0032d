"""Results in a directory: one JSON line each in ``results.jsonl``, with the machine and its noise."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvxfer.bench.errors import BenchError
from kvxfer.bench.report import machine as machines
from kvxfer.bench.run.channel import Message

FILE_NAME = "results.jsonl"
#: Raised when a reader of older records would misunderstand newer ones.
RECORD_VERSION = 1

_FIELDS: dict[str, type | tuple[type, ...]] = {
    "version": int,
    "machine": dict,
    "time": str,
    "noise": (dict, type(None)),
    "result": dict,
}


@dataclass(frozen=True, slots=True)
class Record:
    """One result as it was kept. ``time`` is when it ended, ISO 8601 in UTC."""

    machine: Message
    time: str
    noise: Message | None
    result: Message


@dataclass(frozen=True, slots=True)
class Found:
    """What a directory holds: the records in the order of their keeping, and what was left out and why."""

    records: list[Record]
    warnings: list[str]


def keep(folder: Path, result: Message, noise: Message | None) -> None:
    """Appends one result to the directory, which is made if it is not there.

    The line goes out in one write under a lock and is on disk when this returns: runs that end
    together do not mix, and what is kept stays kept when the next run is interrupted.
    """
    record = {
        "version": RECORD_VERSION,
        "machine": machines.describe(),
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "noise": noise,
        "result": result,
    }
    path = folder / FILE_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _append(path, json.dumps(record).encode())
    except OSError as error:
        raise BenchError(
            f"the result cannot be kept in {path}: {error.strerror}; name another directory with --out"
        ) from error


def check_directory(folder: Path) -> None:
    """Raises before a run whose result could not be kept."""
    at = folder
    while not at.exists() and at != at.parent:
        at = at.parent
    if not at.is_dir():
        raise BenchError(f"--out {folder}: {at} is a file; name a directory")
    if not os.access(at, os.W_OK | os.X_OK):
        raise BenchError(f"--out {folder}: {at} cannot be written; name another directory")


def read(folder: Path) -> Found:
    """Reads what was kept. A line that cannot be used is left out, and said; none left is an error."""
    path = folder / FILE_NAME if folder.is_dir() else folder
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise BenchError(
            f"{path}: there are no results; a run keeps its own there with --out {folder}"
        ) from None
    except OSError as error:
        raise BenchError(f"{path}: cannot be read: {error.strerror}") from error
    found = Found([], [])
    for number, line in _lines(data):
        where = f"{path}:{number}"
        try:
            found.records.append(_record(line))
        except _UnusableError as error:
            found.warnings.append(f"{where}: left out: {error}")
    if not found.records:
        because = f": {found.warnings[0]}" if found.warnings else ""
        raise BenchError(f"{path}: holds no result that can be used{because}")
    return found


class _UnusableError(Exception):
    """Why one line is left out."""


def _append(path: Path, line: bytes) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        # A line that was cut off (a full disk, a lost machine) stays the only one that is lost.
        broken = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        data = (b"\n" if broken else b"") + line + b"\n"
        if os.write(descriptor, data) != len(data):
            raise OSError(28, "No space left on device")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            yield number, line


def _record(line: bytes) -> Record:
    try:
        fields: Any = json.loads(line)
    except ValueError:
        raise _UnusableError("not JSON; it was probably cut off when its run ended") from None
    if not isinstance(fields, dict):
        raise _UnusableError(f"expected an object, found {type(fields).__name__}")
    version = fields.get("version")
    if version != RECORD_VERSION:
        raise _UnusableError(
            f"a record of version {version!r}, this kvxfer reads {RECORD_VERSION}: "
            f"use the kvxfer that wrote it, or measure again"
        )
    unknown = [name for name in fields if name not in _FIELDS]
    missing = [name for name in _FIELDS if name not in fields]
    if unknown or missing:
        parts = [
            f"{word} {', '.join(map(repr, names))}"
            for word, names in (("missing", missing), ("unknown", unknown))
            if names
        ]
        raise _UnusableError(f"fields do not fit: {'; '.join(parts)}; expected {', '.join(_FIELDS)}")
    for name, kind in _FIELDS.items():
        if not isinstance(fields[name], kind):
            raise _UnusableError(f"field {name!r}: found {fields[name]!r}")
    if not isinstance(fields["result"].get("bench"), str):
        raise _UnusableError("the result does not say which bench it is of")
    fields.pop("version")
    return Record(**fields)
