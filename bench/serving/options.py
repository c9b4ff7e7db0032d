"""What `kvxfer bench serving` is asked to do. Knows no engine and no HTTP: those are in their environment."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.bench.engines import tiny_models
from kvxfer.bench.errors import BenchError
from kvxfer.bench.run.option_checks import check_above_zero, check_counts, check_known
from kvxfer.bench.serving import systems
from kvxfer.bench.work import trace as traces
from kvxfer.bench.work.trace import ARRIVALS, TraceRequest


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
        check_known(self, arrivals=ARRIVALS)
        check_counts(self, "requests", "max_tokens", "max_output_tokens", "rounds", "concurrency")
        check_above_zero(self, "rate", "speedup")
        if self.max_tokens + self.max_output_tokens > tiny_models.MAX_TOKENS:
            raise BenchError(
                f"--max-tokens {self.max_tokens} and --max-output-tokens {self.max_output_tokens}: "
                f"together more than the {tiny_models.MAX_TOKENS} tokens of the model"
            )
        check_above_zero(self, "timeout_s")
        systems.chosen(self.systems)

    def read_requests(self) -> list[TraceRequest]:
        """Reads the trace and scales its lengths; raises where it cannot be used."""
        read = traces.read_trace(traces.find_trace(self.trace))
        return traces.scale(read, self.requests, self.max_tokens)
