"""Request traces: the lengths and arrivals of real requests.

Two formats, recognised by the end of the file's name: ``.jsonl`` of Mooncake (FAST'25,
kvcache-ai/Mooncake, Apache-2.0) and ``.csv`` of Azure's LLM inference trace of 2023
(Azure/AzurePublicDataset, CC-BY-4.0). A trimmed sample of each lies in ``data/``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime
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

_AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    ``prefix_ids`` names its prefix blocks of 512 tokens, where the trace does: equal id, equal
    prefix. ``arrival_s`` counts from anywhere.
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
    if path.suffix not in (".jsonl", ".csv"):
        raise BenchError(f"{path}: a trace ends in .jsonl (Mooncake) or .csv (Azure)")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path}: cannot be read: {error}") from error
    read = _mooncake if path.suffix == ".jsonl" else _azure
    requests: list[TraceRequest] = []
    for number, line in enumerate(text.splitlines(), start=1):
        # Lines that start with # carry the licence in a sample.
        if line.strip() and not line.startswith("#") and line != _AZURE_HEADER:
            try:
                requests.append(read(line))
            except (ValueError, TypeError, KeyError) as error:
                words = f"no {path.suffix} request: {type(error).__name__}: {error}"
                raise BenchError(f"{path}:{number}: {words}") from error
    if not requests:
        raise BenchError(f"{path}: holds no request")
    return requests


def scale(requests: list[TraceRequest], num_requests: int, max_tokens: int) -> list[TraceRequest]:
    """Takes the first ``num_requests`` and scales their lengths so that the longest fits.

    One factor for all of them, so that the shape of the distribution stays; it is never above 1.
    Prefix ids count tokens of the unscaled request and are kept as they are.
    """
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


def _mooncake(line: str) -> TraceRequest:
    told = json.loads(line)
    lengths = told["input_length"], told["output_length"]
    return _request(told["timestamp"] / 1e3, *lengths, *told["hash_ids"])


def _azure(line: str) -> TraceRequest:
    arrival, context, generated = line.split(",")
    # The trace has seven digits of a second; Python reads six.
    at = datetime.fromisoformat(arrival[:26]).replace(tzinfo=UTC)
    return _request(at.timestamp(), int(context), int(generated))


def _request(arrival_s: float, input_tokens: Any, output_tokens: Any, *prefix_ids: Any) -> TraceRequest:
    numbers = (input_tokens, output_tokens, *prefix_ids)
    if any(type(number) is not int or number < 0 for number in numbers) or not input_tokens:
        raise ValueError(f"expected whole numbers, and a prompt, found {numbers}")
    return TraceRequest(arrival_s, input_tokens, output_tokens, prefix_ids)
