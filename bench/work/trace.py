"""Request traces: the lengths of real requests, in the format of Mooncake's (FAST'25, Apache-2.0)."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from kvxfer.bench.errors import BenchError
from kvxfer.bench.run.options import Option

#: What the sample that comes along is called on the command line.
SAMPLE = "mooncake"
_SAMPLE_FILE = Path(__file__).parents[1] / "data" / "mooncake_conversation_trace.jsonl"

Trace = Annotated[
    str, Option(f"A file of requests, or the included sample: {SAMPLE}.", value=f"FILE|{SAMPLE}")
]
Requests = Annotated[int, Option("Number of requests, from the start of the trace.", at_least=1)]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    input_tokens: int
    output_tokens: int


def read_trace(name_or_path: str) -> list[TraceRequest]:
    """Reads a whole trace; a line that does not fit the format ends it with an error that says where."""
    path = _SAMPLE_FILE if name_or_path == SAMPLE else Path(name_or_path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        words = f"the trace {name_or_path!r} is neither {SAMPLE} nor a readable file: {error}"
        raise BenchError(words) from error
    requests = []
    for number, line in enumerate(lines, start=1):
        try:
            told = json.loads(line)
            requests.append(TraceRequest(int(told["input_length"]), int(told["output_length"])))
        except (ValueError, TypeError, KeyError) as error:
            raise BenchError(f"{path}:{number}: not a request: {type(error).__name__}: {error}") from error
    return requests


def scale(requests: list[TraceRequest], num_requests: int, max_tokens: int) -> list[TraceRequest]:
    """Takes the first ``num_requests`` and scales their lengths so that the longest fits.

    One factor for all of them, so that the shape of the distribution stays; it is never above 1.
    """
    taken = requests[:num_requests]
    if len(taken) < num_requests:
        raise BenchError(f"the trace has {len(taken)} requests, fewer than --requests {num_requests}")
    factor = min(1.0, max_tokens / max(request.input_tokens for request in taken))
    return [
        replace(
            request,
            input_tokens=max(1, int(request.input_tokens * factor)),
            output_tokens=max(1, int(request.output_tokens * factor)),
        )
        for request in taken
    ]
