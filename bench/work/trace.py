"""Request traces: the lengths and arrivals of real requests.

Two formats, recognised by the end of the file's name: ``.jsonl`` of Mooncake (FAST'25,
kvcache-ai/Mooncake, Apache-2.0) and ``.csv`` of Azure's LLM inference trace of 2023
(Azure/AzurePublicDataset, CC-BY-4.0). A trimmed sample of each lies in ``data/``.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from kvxfer.bench.errors import BenchError
from kvxfer.bench.run.options import Option

#: name on the command line -> what the sample in ``data/`` is called.
SAMPLES = {"mooncake": "mooncake*.jsonl", "azure": "azure*.csv"}

Trace = Annotated[str, Option(f"A file, or a sample: {', '.join(SAMPLES)}")]
Requests = Annotated[int, Option("Taken from the start of the trace.", at_least=1)]
Arrivals = Annotated[
    str,
    Option(
        "closed, poisson, trace: as room comes, at random, as in the trace.",
        one_of=("closed", "poisson", "trace"),
    ),
]
Rate = Annotated[float, Option("Requests a second, of --arrivals poisson.", above=0)]
Speedup = Annotated[float, Option("How much faster than the trace, of --arrivals trace.", above=0)]

#: Tokens of one prefix id, before lengths are scaled.
PREFIX_TOKENS = 512

_MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    ``prefix_ids`` names its prefix blocks of 512 tokens, where the trace does: equal id, equal
    prefix.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()


def find_trace(name_or_path: str) -> Path:
    """Returns the file for ``--trace``: a sample by its name, anything else as a path."""
    if name_or_path in SAMPLES:
        folder = Path(__file__).parents[1] / "data"
        found = sorted(folder.glob(SAMPLES[name_or_path]))
        if not found:
            raise BenchError(
                f"the sample {name_or_path!r} is not in {folder}: reinstall kvxfer or name a file"
            )
        return found[0]
    path = Path(name_or_path)
    if not path.is_file():
        raise BenchError(f"no such trace: {name_or_path!r} is neither a file nor one of {', '.join(SAMPLES)}")
    return path


def read_trace(path: Path) -> list[TraceRequest]:
    """Reads a whole trace; a line that does not fit the format ends it with an error that says where."""
    readers = {".jsonl": _read_mooncake, ".csv": _read_azure}
    if path.suffix not in readers:
        raise BenchError(f"{path}: a trace ends in .jsonl (Mooncake) or .csv (Azure)")
    try:
        requests = list(readers[path.suffix](path))
    except UnicodeDecodeError as error:
        raise BenchError(f"{path}: not UTF-8 text at byte {error.start}") from error
    except OSError as error:
        raise BenchError(f"{path}: cannot be read: {error.strerror}") from error
    if not requests:
        raise BenchError(f"{path}: holds no request")
    return requests


def scale(requests: list[TraceRequest], num_requests: int, max_tokens: int) -> list[TraceRequest]:
    """Takes the first ``num_requests`` and scales their lengths so that the longest fits.

    One factor for all of them, so that the shape of the distribution stays; it is never above 1.
    Prefix ids count tokens of the unscaled request and are kept as they are.
    """
    if num_requests < 1 or max_tokens < 1:
        raise BenchError(f"--requests and --max-tokens are at least 1, not {num_requests} and {max_tokens}")
    taken = requests[:num_requests]
    if len(taken) < num_requests:
        raise BenchError(f"the trace holds {len(taken)} requests, fewer than --requests {num_requests}")
    factor = scale_of(requests, num_requests, max_tokens)
    return [
        replace(
            request,
            input_tokens=max(1, int(request.input_tokens * factor)),
            output_tokens=max(1, int(request.output_tokens * factor)),
        )
        for request in taken
    ]


def scale_of(requests: list[TraceRequest], num_requests: int, max_tokens: int) -> float:
    """Returns the factor by which `scale` multiplies the lengths."""
    return min(1.0, max_tokens / max(request.input_tokens for request in requests[:num_requests]))


def arrivals_s(options: Any, requests: list[TraceRequest]) -> list[float | None]:
    """Returns when each request arrives, from the first on; None when there is room for it.

    ``options`` has ``arrivals``, ``rate``, ``speedup`` and ``seed``.
    """
    if options.arrivals == "poisson":
        gaps = np.random.default_rng(options.seed).exponential(1 / options.rate, len(requests))
        return list(np.cumsum(gaps).tolist())
    if options.arrivals == "trace":
        return [(request.arrival_s - requests[0].arrival_s) / options.speedup for request in requests]
    return [None] * len(requests)


def _read_mooncake(path: Path) -> Iterator[TraceRequest]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise BenchError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
            if not isinstance(record, dict):
                raise BenchError(f"{where}: expected an object, found {type(record).__name__}")
            _check_fields(where, list(record), _MOONCAKE_FIELDS)
            arrival_ms, input_tokens, output_tokens, prefix_ids = (record[name] for name in _MOONCAKE_FIELDS)
            if not isinstance(prefix_ids, list):
                raise BenchError(f"{where}: field 'hash_ids': expected a list, found {prefix_ids!r}")
            yield TraceRequest(
                _count(where, "timestamp", arrival_ms) / 1e3,
                _count(where, "input_length", input_tokens, least=1),
                _count(where, "output_length", output_tokens),
                tuple(_count(where, "hash_ids", value) for value in prefix_ids),
            )


def _read_azure(path: Path) -> Iterator[TraceRequest]:
    first: datetime | None = None
    with path.open(encoding="utf-8", newline="") as lines:
        # Lines that start with # carry the licence in a sample.
        rows = csv.DictReader(line for line in lines if not line.startswith("#"))
        _check_fields(f"{path}: header", list(rows.fieldnames or ()), _AZURE_FIELDS)
        for row in rows:
            where = f"{path}:{rows.line_num}"
            if None in row or None in row.values():
                raise BenchError(f"{where}: expected {len(_AZURE_FIELDS)} fields")
            try:
                # The trace has seven digits of a second; Python reads six.
                arrival = datetime.fromisoformat(row["TIMESTAMP"][:26])
            except ValueError as error:
                raise BenchError(f"{where}: field 'TIMESTAMP': expected a date and time: {error}") from error
            first = first or arrival
            yield TraceRequest(
                (arrival - first).total_seconds(),
                _count(where, "ContextTokens", row["ContextTokens"], least=1),
                _count(where, "GeneratedTokens", row["GeneratedTokens"]),
            )


def _check_fields(where: str, found: list[str], expected: tuple[str, ...]) -> None:
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected]
    parts = [
        f"{word} {', '.join(map(repr, names))}"
        for word, names in (("missing", missing), ("unknown", unknown))
        if names
    ]
    if parts:
        raise BenchError(f"{where}: fields do not fit: {'; '.join(parts)}; expected {', '.join(expected)}")


def _count(where: str, field: str, value: Any, least: int = 0) -> int:
    """Returns a whole number of JSON, or of a text."""
    if isinstance(value, str) and value.isdecimal() and field in _AZURE_FIELDS:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BenchError(f"{where}: field {field!r}: expected a whole number, found {value!r}")
    if value < least:
        raise BenchError(f"{where}: field {field!r}: expected at least {least}, found {value}")
    return value
