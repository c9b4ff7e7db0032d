"""Results in a directory: one JSON line each in ``results.jsonl``, with the machine and its noise."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvxfer.bench.errors import BenchError
from kvxfer.bench.report import machine as machines
from kvxfer.bench.run.channel import Message

FILE_NAME = "results.jsonl"
#: Raised when a reader of older records would misunderstand newer ones.
RECORD_VERSION = 1


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

    The line goes out in one write: those of runs that end together do not mix.
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
        with path.open("ab", buffering=0) as file:
            file.write(json.dumps(record).encode() + b"\n")
    except OSError as error:
        raise BenchError(
            f"the result cannot be written to {path}: {error.strerror}; name another directory with --out"
        ) from error


def check_directory(folder: Path) -> None:
    """Raises before a run whose result could not be kept."""
    at = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not at.is_dir():
        raise BenchError(f"--out {folder}: {at} is a file; name a directory")
    if not os.access(at, os.W_OK | os.X_OK):
        raise BenchError(f"--out {folder}: {at} cannot be written; name another directory")


def read(folder: Path) -> Found:
    """Reads what was kept. A line that cannot be used is left out, and said; none left is an error."""
    path = folder / FILE_NAME if folder.is_dir() else folder
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        words = f"{path}: there are no results; a run with --out {folder} writes its result there"
        raise BenchError(words) from error
    except OSError as error:
        raise BenchError(f"{path}: cannot be read: {error.strerror}") from error
    found = Found([], [])
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            try:
                found.records.append(_record(line))
            except ValueError as error:
                found.warnings.append(f"{path}:{number}: left out: {error}")
    if not found.records:
        because = f": {found.warnings[0]}" if found.warnings else ""
        raise BenchError(f"{path}: has no usable result{because}")
    return found


def _record(line: bytes) -> Record:
    """Returns a record; raises ``ValueError`` for what cannot be used, in words."""
    try:
        told: Any = json.loads(line)
    except ValueError:
        raise ValueError("not JSON; it was probably cut off when its run ended") from None
    expected = {"version", *(field.name for field in fields(Record))}
    if told.keys() != expected or told.pop("version") != RECORD_VERSION or "bench" not in told["result"]:
        raise ValueError(
            f"not a record of version {RECORD_VERSION}: use the kvxfer that wrote it, or measure again"
        )
    return Record(**told)
