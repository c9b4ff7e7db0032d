"""What the router and the demonstration are asked to do. Knows no engine and no HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kvxfer.bench.run.options import Option, check

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
    """Show disaggregated serving with vLLM: are the tokens those of one engine? `make demo-vllm` runs this.

    Decode pulls behind one router, prefill pushes behind another. Status 1 when a token differs, or when
    decode computed by itself what it was to get.
    """
