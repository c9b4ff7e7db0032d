"""Options of `kvxfer bench serving`. Needs no engine and no HTTP; those are in their environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from kvxfer.bench.engines import tiny_models
from kvxfer.bench.engines.options import ENGINES
from kvxfer.bench.errors import BenchError
from kvxfer.bench.run.options import Option, Seed, check
from kvxfer.bench.serving import systems
from kvxfer.bench.work import trace as traces
from kvxfer.bench.work.trace import Requests, Trace, TraceRequest

_ALL: Final = "all"
_SYSTEMS: Final = "; ".join(f"with {engine} {', '.join(systems.names_of(engine))}" for engine in ENGINES)


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """Serve a trace with real prefill and decode engines, in turns with this connector and with others.

    Needs `make bench-serving-setup`. Each engine pair takes a minute to start. In each round, every system
    serves the same requests once, with prompts that no other round has.

    kvxfer bench serving --systems kvxfer-pull,nixl --rounds 5 --out results
    """

    engine: Annotated[str, Option("The engine to run.", one_of=ENGINES)] = ENGINES[0]
    systems: Annotated[
        tuple[str, ...],
        Option(f"Systems to measure, or {_ALL}: {_SYSTEMS}.", one_of=(_ALL, *systems.NAMES), value="SYSTEM"),
    ] = (_ALL,)
    trace: Trace = traces.SAMPLE
    requests: Requests = 8
    max_tokens: Annotated[
        int, Option("Tokens of the longest prompt; all lengths are scaled to it.", at_least=1)
    ] = 1024
    max_output_tokens: Annotated[int, Option("The most tokens of an answer.", at_least=1)] = 16
    rounds: Annotated[
        int,
        Option(
            "Number of rounds. In each round, every system serves all requests, in rotated order.", at_least=1
        ),
    ] = 3
    concurrency: Annotated[int, Option("Requests that run at the same time.", at_least=1)] = 2
    seed: Seed = 1
    timeout_s: Annotated[float, Option("How long a server may be silent.", above=0)] = 60.0

    def __post_init__(self) -> None:
        check(self)
        known = (_ALL, *systems.names_of(self.engine))
        if other := [name for name in self.systems if name not in known]:
            raise BenchError(f"--systems {','.join(other)}: --engine {self.engine} has {', '.join(known)}")
        if self.max_tokens + self.max_output_tokens > tiny_models.MAX_TOKENS:
            raise BenchError(
                f"--max-tokens {self.max_tokens} and --max-output-tokens {self.max_output_tokens}: "
                f"together more than the {tiny_models.MAX_TOKENS} tokens of the model"
            )
        self.read_requests()

    @property
    def wanted(self) -> tuple[str, ...]:
        """The names of the systems to measure."""
        return systems.names_of(self.engine) if _ALL in self.systems else self.systems

    def read_requests(self) -> list[TraceRequest]:
        """Reads the trace and scales its lengths; raises if it cannot be used."""
        return traces.scale(traces.read_trace(self.trace), self.requests, self.max_tokens)


@dataclass(frozen=True, slots=True)
class AbandonedOptions:
    """Measure how long prefill makes others wait if clients leave and the router does not ask decode.

    Needs `make bench-serving-setup`. For each connector in turn, clients ask prefill one by one, and decode
    is not asked for most of them. A connector that keeps blocks for 30 s keeps the cache full for that time.

    kvxfer bench abandoned --systems kvxfer-pull,nixl --clients 20 --leave 16
    """

    systems: Annotated[
        tuple[str, ...],
        Option(f"Systems to measure: {', '.join(systems.PULLS)}.", one_of=systems.PULLS, value="SYSTEM"),
    ] = (systems.OURS, "nixl")
    clients: Annotated[int, Option("Number of clients, one after the other.", at_least=1)] = 100
    leave: Annotated[int, Option("Number of clients that leave, chosen at random.", at_least=0)] = 80
    prompts_kept: Annotated[int, Option("Number of prompts that fill an engine's cache.", at_least=2)] = 8
    # Together with an answer, a prompt of this length fits into a tiny engine.
    prompt_tokens: Annotated[int, Option("Tokens of each prompt.", above=0, at_most=1000)] = 512
    seed: Seed = 1

    def __post_init__(self) -> None:
        check(self)
        if self.leave > self.clients:
            raise BenchError(f"--leave {self.leave} is more than --clients {self.clients}")
