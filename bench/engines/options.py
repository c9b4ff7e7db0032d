"""Options of the router and of the demonstration. Needs no engine and no HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kvxfer.bench.run.options import Option, check

#: Engines that are run here; the first one is the default.
ENGINES = ("vllm", "sglang")
#: How a router asks engines: one after the other, or both at once.
DISPATCHES = ("sequential", "concurrent")


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Run a small router before prefill and decode engines, for tests and demonstrations.

    kvxfer bench router --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200
    """

    prefill: Annotated[tuple[str, ...], Option("URLs of prefill engines, separated by commas or repeated.")]
    decode: Annotated[tuple[str, ...], Option("URLs of decode engines.")]
    host: Annotated[str, Option("The address at which the router listens.")] = "127.0.0.1"
    port: Annotated[int, Option("Its port.", at_least=0, at_most=65535)] = 8000
    dispatch: Annotated[
        str, Option("sequential: decode pulls; concurrent: prefill pushes.", one_of=DISPATCHES)
    ] = "sequential"
    silence_timeout_s: Annotated[
        float, Option("How long an engine may be silent before the request fails.", above=0)
    ] = 300.0

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Compare disaggregated serving's tokens with one engine's; `make demo-vllm`, `make demo-sglang`.

    With vLLM decode pulls behind one router, and prefill pushes behind another; with SGLang prefill pushes,
    behind SGLang's router. The status is 1 if a token differs, or if decode computed a prompt itself.

    kvxfer bench demo --engine vllm
    """

    engine: Annotated[str, Option("The engine to run.", one_of=ENGINES)] = ENGINES[0]

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Start the nodes of deploy/compose as processes, each in its own network. `make cluster`.

    Two daemons, etcd and Prometheus have the command lines of compose.yaml. A prefill engine runs beside one
    daemon and a decode engine beside the other, behind one router; their spans go to a daemon. The command
    sends prompts through the router and shows the trace of one request. It runs until it is interrupted. The
    status is 1 if a token differs.

    kvxfer bench cluster --once --mbit-s 1000
    """

    once: Annotated[bool, Option("Stop when the prompts are answered.")] = False
    prompts: Annotated[int, Option("Number of prompts to send.", at_least=1)] = 4
    mbit_s: Annotated[int, Option("Rate limit of each node's cable; 0 for no limit.", at_least=0)] = 0
    etcd: Annotated[str, Option("The program.", value="FILE")] = "etcd"
    prometheus: Annotated[str, Option("The program.", value="FILE")] = "prometheus"

    def __post_init__(self) -> None:
        check(self)
