"""What the router and the demonstration are asked to do. Knows no engine and no HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kvxfer.bench.run.options import Option, check

#: Engines that are run here; the first where nobody says which.
ENGINES = ("vllm", "sglang")
#: How a router asks engines: one after the other, or both at once.
DISPATCHES = ("sequential", "concurrent")


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Run a small router before prefill and decode engines, for tests and demonstrations."""

    prefill: Annotated[tuple[str, ...], Option("URLs of engines, repeated or with commas between.")]
    decode: Annotated[tuple[str, ...], Option("The same of decode engines.")]
    host: str = "127.0.0.1"
    port: int = 8000
    dispatch: Annotated[
        str, Option("sequential: decode pulls; concurrent: prefill pushes.", one_of=DISPATCHES)
    ] = "sequential"
    silence_timeout_s: Annotated[
        float, Option("How long an engine may say nothing before it has failed.", above=0)
    ] = 300.0

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Show disaggregated serving: are the tokens those of one engine? `make demo-vllm`, `make demo-sglang`.

    With vLLM decode pulls behind one router, and prefill pushes behind another; with SGLang prefill pushes,
    behind SGLang's router. Status 1 when a token differs, or when decode computed what it was to get.
    """

    engine: Annotated[str, Option("Which engines serve.", one_of=ENGINES)] = ENGINES[0]

    def __post_init__(self) -> None:
        check(self)
