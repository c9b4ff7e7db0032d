"""Real engines for tests: one alone, whose tokens are the truth, and a prefill and a decode with a router."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvxfer.bench import tiny_models
from kvxfer.bench.router_server import RouterServer
from kvxfer.bench.vllm_server import Completion, VllmServer, complete, kvxfer_config

TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass(frozen=True)
class Engines:
    """Engines of one model, and a router before two of them."""

    alone: VllmServer
    prefill: VllmServer
    decode: VllmServer
    router: RouterServer

    def expected(self, prompt: str, max_tokens: int = 32) -> list[int]:
        """Returns the tokens that an engine without a connector gives."""
        return complete(self.alone, prompt, max_tokens).token_ids

    def prefilled(self, prompt: str, request_id: str, **params: Any) -> dict[str, Any]:
        """Does what a router does first, and returns the parameters that it would hand to decode."""
        answer = complete(
            self.prefill,
            prompt,
            max_tokens=1,
            request_id=request_id,
            kv_transfer_params={**TO_PREFILL, **params},
        )
        assert answer.kv_transfer_params, f"{self.prefill.name} handed nothing over"
        return answer.kv_transfer_params

    def decoded(
        self, prompt: str, request_id: str, params: dict[str, Any], max_tokens: int = 32
    ) -> Completion:
        """Does what a router does next."""
        return complete(self.decode, prompt, max_tokens, request_id=request_id, kv_transfer_params=params)


def start_engines(model: str, folder: Path, **extra: Any) -> Iterator[Engines]:
    """Starts the engines of a tiny model, all at once, and ends them in the end.

    ``extra`` are settings of the connector, at both sides.
    """
    weights = tiny_models.save(model, folder / "model")
    with ExitStack() as stack:

        def start(name: str, config: dict[str, Any] | None = None) -> VllmServer:
            log = folder / f"{name}.log"
            server = VllmServer(f"{model} {name}", weights, log, kv_transfer_config=config)
            return stack.enter_context(server)

        alone = start("alone")
        prefill = start("prefill", kvxfer_config("kv_producer", **extra))
        decode = start("decode", kvxfer_config("kv_consumer", **extra))
        router = stack.enter_context(
            RouterServer(prefills=[prefill.url], decodes=[decode.url], log=folder / "router.log")
        )
        yield Engines(alone.wait_ready(), prefill.wait_ready(), decode.wait_ready(), router.wait_ready())
