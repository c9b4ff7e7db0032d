"""What `kvxfer bench serving` is asked to do. Knows no engine and no HTTP: those are in their environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvxfer.bench import serving_systems as systems
from kvxfer.bench import tiny_models
from kvxfer.bench import trace as traces
from kvxfer.bench.errors import BenchError
from kvxfer.bench.trace import TraceRequest

ARRIVALS: Final = ("closed", "poisson", "trace")


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """What is served, how, and how often.

    In a round every system serves the same requests once, with prompts that no other round had.
    Requests arrive ``concurrency`` at a time (``closed``), at ``rate`` a second with exponential gaps
    (``poisson``), or as in the trace, ``speedup`` times faster (``trace``).
    """

    systems: tuple[str, ...] = systems.NAMES
    trace: str = "mooncake"
    requests: int = 8
    max_tokens: int = 1024
    max_output_tokens: int = 16
    rounds: int = 3
    arrivals: str = "closed"
    concurrency: int = 2
    rate: float = 0.5
    speedup: float = 1.0
    seed: int = 1
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.arrivals not in ARRIVALS:
            raise BenchError(f"unknown --arrivals {self.arrivals!r}; known are {', '.join(ARRIVALS)}")
        for name in ("requests", "max_tokens", "max_output_tokens", "rounds", "concurrency"):
            if getattr(self, name) < 1:
                raise BenchError(f"--{name.replace('_', '-')} is at least 1, not {getattr(self, name)}")
        for name in ("rate", "speedup"):
            if not 0 < getattr(self, name) < float("inf"):
                raise BenchError(f"--{name} is above 0, unlike {getattr(self, name):g}")
        if self.max_tokens + self.max_output_tokens > tiny_models.MAX_TOKENS:
            raise BenchError(
                f"--max-tokens {self.max_tokens} and --max-output-tokens {self.max_output_tokens}: "
                f"together more than the {tiny_models.MAX_TOKENS} tokens of the model"
            )
        if not 0 < self.timeout_s < float("inf"):
            raise BenchError(f"--timeout-s is above 0, unlike {self.timeout_s:g}")
        systems.chosen(self.systems)

    def read_requests(self) -> list[TraceRequest]:
        """Reads the trace and scales its lengths; raises where it cannot be used."""
        read = traces.read_trace(traces.find_trace(self.trace))
        return traces.scale(read, self.requests, self.max_tokens)
