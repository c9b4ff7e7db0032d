"""Real engines for tests: one alone for the expected tokens, and a prefill and a decode with a router."""

from __future__ import annotations

import json
import random
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvxfer.bench.engines.server_process import RouterServer, ServerProcess
from kvxfer.bench.engines.vllm_server import Completion, VllmServer, complete, kvxfer_config
from tests import fork_server
from tests.seeds import next_seed
from tests.vllm import forked as vllm_forked
from tests.vllm import tiny_models
from tests.waiting import until

ROOT = Path(__file__).parents[2]
OBSERVER = ("ObservedConnector", "tests.vllm.observed")
#: While this file is in the observer's folder, exponent bits of fetched prompts are flipped: in their states
#: if it says "states", else in their first page of tokens; in the last layer if it says "draft".
FLIP = "flip"
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}

Ranks = list[dict[str, str]]


@dataclass(frozen=True)
class Engines:
    """Engines of one model, and a router before two of them."""

    alone: VllmServer
    prefill: VllmServer
    decode: VllmServer
    router: RouterServer
    observed: Path  # where both connectors write what they saw (tests/vllm/observed.py)

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

    def ranks(self) -> Ranks:
        """Returns the addresses of prefill's agents, from its answers."""
        return ranks_of(self.prefill)

    def pushed(self, prompt: str, ranks: Ranks, **how: Any) -> Completion:
        """Does what a router does that asks both engines at once."""
        return push(self.prefill, self.decode, prompt, ranks, **how)

    def wait_empty(self, timeout_s: float = 20.0) -> None:
        """Waits until neither cache holds a block for a reader."""
        for server in (self.prefill, self.decode):
            until(partial(_is_empty, server), f"{server.name} without blocks", timeout_s=timeout_s)

    def has_expired(self, request_id: str) -> bool:
        """Whether prefill gave blocks of a request back because no reader came for them."""
        log = self.prefill.log.read_text(errors="replace").splitlines()
        return any(
            f"cmpl-{request_id}-" in line and "not all of its readers finished" in line for line in log
        )

    def forget_prefixes(self) -> None:
        """Empties the prefix cache of decode."""
        self.decode.client.post("/reset_prefix_cache").raise_for_status()


def _is_empty(server: VllmServer) -> bool:
    return not server.metric("vllm:kv_cache_usage_perc")


def ranks_of(prefill: VllmServer) -> Ranks:
    """Returns the addresses of an engine's agents, from its answers."""
    params = complete(prefill, random_prompt(5), 1, kv_transfer_params=TO_PREFILL).kv_transfer_params
    assert params, f"{prefill.name} handed nothing over"
    ranks: Ranks = params["kvxfer"]["ranks"]
    return ranks


def push(
    prefill: VllmServer,
    decode: VllmServer,
    prompt: str | Sequence[int],
    ranks: Ranks,
    *,
    max_tokens: int = 32,
    key: str = "",
    prefill_waits_s: float = 0.0,
    decode_waits_s: float = 0.0,
) -> Completion:
    """Does what a router does that asks both engines at once; either may be asked later."""
    own = {"version": 1, "push": key or secrets.token_hex(16)}

    def ask_prefill() -> None:
        time.sleep(prefill_waits_s)
        complete(prefill, prompt, 1, kv_transfer_params={**TO_PREFILL, "kvxfer": own})

    def ask_decode() -> Completion:
        time.sleep(decode_waits_s)
        params = {"do_remote_prefill": True, "kvxfer": {**own, "ranks": ranks}}
        return complete(decode, prompt, max_tokens, kv_transfer_params=params)

    with ThreadPoolExecutor(2) as threads:
        asked = threads.submit(ask_prefill)
        answer = threads.submit(ask_decode).result()
        asked.result()
    return answer


def random_prompt(num_tokens: int, seed: int = 1) -> str:
    """Returns a text of `num_tokens` tokens with which no other test begins."""
    letters = random.Random(next_seed("prompt", num_tokens, seed))
    return "".join(letters.choices("abcdefghijklmnopqrstuvwxyz ", k=num_tokens))


class _Fork(ServerProcess):
    def __init__(self, name: str, command: Sequence[str], log: Path, **options: Any) -> None:
        forked = [sys.executable, "-m", fork_server.__name__, str(fork_server.start(vllm_forked.__name__))]
        super().__init__(name, [*forked, *command[1:]], log, **options)


class _Forked(VllmServer, _Fork):
    """A `VllmServer` that has nothing to import."""


def server(
    name: str,
    weights: Path,
    folder: Path,
    role: str = "",
    policy: str = "fail",
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    forked: bool = True,
    engine_id: str = "",
    **extra: Any,
) -> VllmServer:
    """Returns an engine that is starting, with the observed connector where it has a role.

    ``policy`` is what happens to requests whose cache cannot be loaded, ``engine_id`` the name if vLLM does
    not draw one, and ``extra`` are settings of the connector. An engine that is not ``forked`` imports what
    it needs and spawns its processes, as outside of tests.
    """
    config = None
    if role:
        # If a dozen spinning processes share two cores, one may not run for 15 s, including its HTTP server.
        # So a peer that is silent for seconds is not lost.
        patience = {"connect_timeout_s": 20.0, "silent_timeout_s": 60.0}
        # Blocks kept for later turns are given back in the same time.
        times = {"return_ttl_s": extra["lease_ttl_s"]} if "lease_ttl_s" in extra else {}
        config = kvxfer_config(role, **{**patience, **times, **extra})
        config["kv_connector"], config["kv_connector_module_path"] = OBSERVER
        config["kv_load_failure_policy"] = policy
        if engine_id:
            config["engine_id"] = engine_id
    observed = folder / "observed"
    observed.mkdir(exist_ok=True)
    return (_Forked if forked else VllmServer)(
        name,
        weights,
        folder / f"{name}.log",
        kv_transfer_config=config,
        arguments=[*arguments, *_backend(weights)],
        environment={
            "PYTHONPATH": str(ROOT),
            "KVXFER_OBSERVED": str(observed),
            "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
            **(environment or {}),
        },
    )


def _backend(weights: Path) -> list[str]:
    # For MLA vLLM prefers its own kernel on processors with AMX, which does not support float32.
    config = json.loads((weights / "config.json").read_text())
    return ["--attention-backend", "CPU_MLA"] if "kv_lora_rank" in config else []


@contextmanager
def start_pair(
    weights: Path,
    folder: Path,
    roles: tuple[str, str] = ("kv_producer", "kv_consumer"),
    policy: str = "fail",
    **options: Any,
) -> Iterator[tuple[VllmServer, VllmServer]]:
    """Starts a prefill and a decode engine, whose ``policy`` it is; ``options`` are `server`'s, for both."""
    with (
        server("prefill", weights, folder, roles[0], **options) as prefill,
        server("decode", weights, folder, roles[1], policy, **options) as decode,
    ):
        yield prefill.wait_ready(), decode.wait_ready()


@contextmanager
def start_engines(
    model: str, folder: Path, alone: VllmServer | None = None, **options: Any
) -> Iterator[Engines]:
    """Starts a router and a pair whose engines may both fetch, as a later turn's prefill does.

    The expected tokens come from ``alone``, or from prefill without a handover.
    """
    weights = tiny_models.save(model, folder / "model")
    with (
        start_pair(weights, folder, ("kv_both", "kv_both"), **options) as (prefill, decode),
        RouterServer([prefill.url], [decode.url], folder / "router.log") as router,
    ):
        yield Engines(alone or prefill, prefill, decode, router.wait_ready(), folder / "observed")
