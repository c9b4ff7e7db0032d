"""What the router and the demonstration are asked to do. Knows no engine and no HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kvxfer.bench.run.options import Option, check

#: How a router asks engines: one after the other, or both at once.
DISPATCHES = ("sequential", "concurrent")


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Run a small router before prefill and decode engines, for tests and demonstrations.

    It speaks the protocol that vLLM's connectors and the community's routers have settled on. In production
    one of those stands here.
    """

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
    """Show disaggregated serving with vLLM: are the tokens those of one engine? `make demo-vllm` runs this.

    A prefill and a decode engine of a tiny model run on the CPU with kvxfer's connector and routers before
    them: one asks prefill and then decode, which pulls; one asks both at once, and prefill pushes. A third
    engine, alone, says what the tokens must be. Status 1 when one differs, or when decode computed by itself
    what it was to get.
    """
