"""An SGLang engine behind its own server, on the CPU, and SGLang's own routers, for tests and demonstrations.

Start-up steps that bring nothing for a tiny model are off. A start still takes most of a minute, so start
all engines that you need and then wait for all of them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from kvxfer.bench.engines import sglang_cpu
from kvxfer.bench.engines.server_process import EngineServer, ServerProcess, reserved_port
from kvxfer.bench.errors import BenchError

#: The name that models are served under.
MODEL: Final = "tiny"
#: Tokens of a page.
TOKENS_PER_PAGE: Final = 16
#: The name of kvxfer's plug-in, and of its transfer backend.
KVXFER: Final = "kvxfer"

# Gauges of an engine's open requests, in all its queues.
_IN_HAND: Final = (
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:num_prefill_bootstrap_queue_reqs",
    "sglang:num_prefill_inflight_queue_reqs",
    "sglang:num_decode_prealloc_queue_reqs",
    "sglang:num_decode_transfer_queue_reqs",
)
# Two engines that start on two busy cores at once took 80 s.
_READY_TIMEOUT_S: Final = 240.0

_MOST_WORKERS: Final = 8

ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    # `/health` only asks whether the server is up; it generates nothing.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    # With more workers than NUMA nodes, SGLang needs their processors named. Here they share all.
    "SGLANG_CPU_OMP_THREADS_BIND": "|".join([f"0-{(os.cpu_count() or 1) - 1}"] * _MOST_WORKERS),
}


def plugins(folder: Path, functions: Mapping[str, str], path: str) -> dict[str, str]:
    """Returns variables that make an engine call functions (``module:function``, by name) as it starts.

    SGLang then loads no other plug-in but kvxfer's. ``folder`` takes the metadata by which SGLang finds the
    functions; ``path`` is the rest of the engine's PYTHONPATH.
    """
    package = folder / "plugins" / "kvxfer_bench_plugins-1.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: kvxfer-bench-plugins\nVersion: 1\n")
    lines = [f"{name} = {function}" for name, function in functions.items()]
    (package / "entry_points.txt").write_text("\n".join(["[sglang.srt.plugins]", *lines, ""]))
    paths = [str(package.parent), *filter(None, [path])]
    return {"PYTHONPATH": os.pathsep.join(paths), "SGLANG_PLUGINS": ",".join([KVXFER, *functions])}


class SglangServer(EngineServer):
    """One SGLang server; ``name``, ``log`` and ``environment`` are as of `ServerProcess`.

    ``model`` is a folder with a model and its tokenizer (`kvxfer.bench.engines.tiny_models`). ``role`` is
    ``prefill``, ``decode``, or nothing for an engine that does both and has no transfer backend.
    ``functions`` are plug-ins beside the one for the CPU (`plugins`), ``arguments`` further ones of SGLang.
    """

    def __init__(
        self,
        name: str,
        model: Path,
        log: Path,
        *,
        role: str = "",
        backend: str = KVXFER,
        num_tokens: int = 8192,
        functions: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if importlib.util.find_spec("sglang") is None:
            raise BenchError(
                "SGLang is not installed: `make demo-sglang` and `make test-sglang` set up .sglang"
            )
        self.role = role
        self._bootstrap = reserved_port()
        command = [
            *(sys.executable, "-W", "ignore", "-m", "sglang.launch_server"),
            *("--model-path", str(model), "--served-model-name", MODEL),
            *("--dtype", json.loads((model / "config.json").read_text())["dtype"]),
            *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
            *("--disable-cuda-graph", "--disable-overlap-schedule", "--grammar-backend", "none"),
            *("--skip-server-warmup", "--enable-metrics", "--log-level-http", "warning"),
            *("--page-size", str(TOKENS_PER_PAGE), "--max-total-tokens", str(num_tokens)),
            *("--context-length", "1024", "--max-running-requests", "16"),
        ]
        if role:
            command += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", backend]
        if role == "prefill":
            command += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        known = {sglang_cpu.NAME: sglang_cpu.ENTRY_POINT, **(functions or {})}
        path = {**os.environ, **(environment or {})}.get("PYTHONPATH", "")
        super().__init__(
            name,
            [*command, *arguments],
            log,
            environment={
                **ENVIRONMENT,
                **(environment or {}),
                **plugins(log.with_suffix(""), known, path),
            },
            ready_timeout_s=_READY_TIMEOUT_S,
        )

    @property
    def bootstrap_port(self) -> int:
        """The port at which a prefill engine tells decode engines about its ranks."""
        port: int = self._bootstrap.getsockname()[1]
        return port

    def stop(self) -> None:
        super().stop()
        self._bootstrap.close()

    def is_busy(self) -> bool:
        """Whether it has an open request, in any of its queues."""
        return any(self.metric(name) for name in _IN_HAND)

    def megabytes_moved(self) -> float:
        """Returns the MiB that this prefill engine has moved to decode so far, as its backend reports."""
        return self.metric("sglang:kv_transfer_total_mb_sum")

    def flush_cache(self) -> None:
        """Forgets all prefixes; fails while a request runs."""
        self.client.post("/flush_cache").raise_for_status()


class SglangRouter(ServerProcess):
    """SGLang's own router between prefill and decode engines: the one in Rust, or its small load balancer."""

    def __init__(
        self,
        prefills: Sequence[SglangServer],
        decodes: Sequence[SglangServer],
        log: Path,
        *,
        mini: bool = False,
    ) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "sglang_router.launch_router", "--pd-disaggregation"]
        for prefill in prefills:
            command += ["--prefill", prefill.url, str(prefill.bootstrap_port)]
        for decode in decodes:
            command += ["--decode", decode.url]
        # No retries, so that a failed request shows.
        command += ["--policy", "random", "--disable-retries", "--disable-circuit-breaker"]
        self._metrics = reserved_port()
        command += ["--mini-lb"] if mini else ["--prometheus-port", str(self._metrics.getsockname()[1])]
        super().__init__(
            "SGLang's router",
            command,
            log,
            environment=ENVIRONMENT,
            ready_timeout_s=_READY_TIMEOUT_S,
            # The router answers before it knows that its engines are up.
            health="/health" if mini else "/readiness",
        )

    def stop(self) -> None:
        super().stop()
        self._metrics.close()


@dataclass(frozen=True, slots=True)
class Generated:
    """What an engine, or a router before engines, answered to one prompt."""

    text: str
    token_ids: list[int]
    finish_reason: Mapping[str, Any]
    num_prompt_tokens: int
    num_cached_tokens: int

    @classmethod
    def parse(cls, answer: Mapping[str, Any]) -> Self:
        """Reads a body of ``/generate``."""
        meta = answer["meta_info"]
        return cls(
            answer["text"],
            answer["output_ids"],
            meta["finish_reason"],
            meta["prompt_tokens"],
            meta["cached_tokens"],
        )


def generate(server: ServerProcess, prompt: str, max_tokens: int = 32, **fields: Any) -> Generated:
    """Asks an engine, or a router before engines, for the greedy continuation of a prompt.

    Further ``fields`` go into the request unchanged.
    """
    answer = server.client.post("/generate", json=generate_request(prompt, max_tokens, **fields))
    if not answer.is_success:
        raise BenchError(f"{server.name} answered {answer.status_code}: {answer.text}")
    return Generated.parse(answer.json())


def generate_request(prompt: str, max_tokens: int = 32, **fields: Any) -> dict[str, Any]:
    """Returns the body of such a request."""
    sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
    return {"text": prompt, "sampling_params": sampling, **fields}


def generate_apart(
    prefill: SglangServer, decode: SglangServer, prompt: str, max_tokens: int = 32, **fields: Any
) -> Generated:
    """Does what a router does: asks both at once, and returns decode's answer."""
    fields = {**meeting(prefill), **fields}
    with ThreadPoolExecutor(2) as threads:
        asked = threads.submit(generate, prefill, prompt, max_tokens, **fields)
        answer = threads.submit(generate, decode, prompt, max_tokens, **fields).result()
        asked.result()
    return answer


def meeting(prefill: SglangServer) -> dict[str, Any]:
    """Returns the fields that tell both engines of a request where its halves meet."""
    return {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": secrets.randbelow(1 << 63),
    }
