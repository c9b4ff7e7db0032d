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
    """Show disaggregated serving: are the tokens those of one engine? `make demo-vllm`, `make demo-sglang`.

    With vLLM decode pulls behind one router, and prefill pushes behind another; with SGLang prefill pushes,
    behind SGLang's router. Status 1 when a token differs, or when decode computed what it was to get.

    kvxfer bench demo --engine vllm
    """

    engine: Annotated[str, Option("The engine to run.", one_of=ENGINES)] = ENGINES[0]

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Start the nodes of deploy/compose as processes, each in a network of its own. `make cluster`.

    Two daemons, etcd and Prometheus have the command lines of compose.yaml. Beside one daemon runs a prefill
    engine, beside the other a decode engine, and a router before both; their spans go to a daemon. Prompts
    are sent through the router, and one request's way is shown. All goes on until it is interrupted. Status 1
    when a token differs.

    kvxfer bench cluster --once --mbit-s 1000
    """

    once: Annotated[bool, Option("Stop when the prompts are answered.")] = False
    prompts: Annotated[int, Option("Number of prompts to send.", at_least=1)] = 4
    mbit_s: Annotated[int, Option("Rate limit of each node's cable; 0 for no limit.", at_least=0)] = 0
    etcd: Annotated[str, Option("The program.", value="FILE")] = "etcd"
    prometheus: Annotated[str, Option("The program.", value="FILE")] = "prometheus"

    def __post_init__(self) -> None:
        check(self)
