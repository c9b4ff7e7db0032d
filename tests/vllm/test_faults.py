"""Engines that die, restart or are impostors: the others continue to serve, and no block stays held."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvxfer.bench.engines.vllm_server import VllmServer, complete, completion_request
from kvxfer.bench.errors import BenchError
from tests.vllm import tiny_models
from tests.vllm.engine import TO_PREFILL, Engines, random_prompt, server, start_pair

#: Short, so that blocks without a reader are given back while a test waits.
LEASE_TTL_S = 5.0
NUM_REQUESTS = 500
# Only sockets: the memory of a stopped process could still be read, but its sockets are silent.
SETTINGS: dict[str, Any] = {
    "transports": ["tcp"],
    "lease_ttl_s": LEASE_TTL_S,
    "load_timeout_s": 4.0,
    "silent_timeout_s": 2.0,
}

Two = tuple[VllmServer, VllmServer]


def over_sockets(policy: str, folder: Path) -> AbstractContextManager[Two]:
    """A prefill and a decode that use only sockets."""
    return start_pair(tiny_models.save("llama", folder / "model"), folder, policy=policy, **SETTINGS)


@pytest.fixture(scope="module")
def pair(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """A separate pair, whose decode computes what it cannot load."""
    folder = tmp_path_factory.mktemp("over-sockets")
    with over_sockets("recompute", folder) as (prefill, decode):
        yield Engines(engines.alone, prefill, decode, engines.router, folder / "observed")


@pytest.fixture
def strangers(tmp_path: Path) -> Iterator[Two]:
    """An engine that does not know the secret (here there is none), and one with another model's cache."""
    weights = tiny_models.save("llama", tmp_path / "model")
    other_weights = tiny_models.save("deepseek", tmp_path / "other-model")
    secret = {"KVXFER_SECRET": "0123456789abcdef0123456789abcdef"}
    with (
        server("stranger", weights, tmp_path, "kv_consumer", environment=secret, **SETTINGS) as stranger,
        server("other-model", other_weights, tmp_path, "kv_consumer", **SETTINGS) as other,
    ):
        yield stranger.wait_ready(), other.wait_ready()


@pytest.fixture
def replacements(tmp_path: Path) -> Iterator[Two]:
    with over_sockets("fail", tmp_path) as two:
        yield two


def num_descriptors(pair: Engines) -> int:
    """Returns the open files of all processes of both engines."""
    groups = pair.prefill.pid, pair.decode.pid
    return sum(
        len(list((process / "fd").iterdir()))
        for process in Path("/proc").iterdir()
        if process.name.isdigit() and os.getpgid(int(process.name)) in groups
    )


def test_a_stopped_prefill_is_given_up_and_comes_back(pair: Engines) -> None:
    prompt = random_prompt(300)
    params = pair.prefilled(prompt, "stopped")
    warm = random_prompt(40)
    pair.decoded(warm, "warm", pair.prefilled(warm, "warm"))
    pair.prefill.signal(signal.SIGSTOP)
    try:
        assert pair.decoded(prompt, "stopped", params).token_ids == pair.expected(prompt)
    finally:
        pair.prefill.signal(signal.SIGCONT)
    again = random_prompt(300)
    brought = pair.decode.prompt_tokens("external_kv_transfer")
    assert pair.decoded(again, "again", pair.prefilled(again, "again")).token_ids == pair.expected(again)
    assert pair.decode.prompt_tokens("external_kv_transfer") > brought
    pair.wait_empty()


def test_blocks_that_nobody_fetches_come_back(pair: Engines) -> None:
    for at in range(4):
        pair.prefilled(random_prompt(200), f"forgotten-{at}")
    assert pair.prefill.metric("vllm:kv_cache_usage_perc") > 0
    pair.wait_empty(LEASE_TTL_S + 20)


def test_clients_that_go_away_leave_nothing_behind(pair: Engines, seed: int) -> None:
    random_ = random.Random(seed)
    descriptors = num_descriptors(pair)
    gone = []

    def one(at: int) -> None:
        prompt = random_prompt(random_.randrange(20, 600), seed=at)
        try:
            request = completion_request(prompt, 1, f"r{at}", kv_transfer_params=TO_PREFILL)
            timeout = random_.choice([0.02, 0.1, 30])
            answer = httpx.post(f"{pair.prefill.url}/v1/completions", timeout=timeout, **request)
            params = answer.json()["kv_transfer_params"]
            request = completion_request(prompt, 16, f"r{at}", kv_transfer_params=params)
            timeout = random_.choice([0.01, 0.05, 0.2, 30])
            httpx.post(f"{pair.decode.url}/v1/completions", timeout=timeout, **request)
        except httpx.TimeoutException:
            gone.append(at)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(NUM_REQUESTS)))
    assert gone, "every client had its answer in time"
    pair.wait_empty(LEASE_TTL_S + 20)
    prompt = random_prompt(100)
    assert pair.decoded(prompt, "after", pair.prefilled(prompt, "after")).token_ids == pair.expected(prompt)
    pair.wait_empty()
    # HTTP connections vary; a leak would grow with every request.
    assert num_descriptors(pair) < descriptors + 50


def test_strangers_are_refused_by_their_request_alone(pair: Engines, strangers: Two) -> None:
    for engine, reason in zip(strangers, ("auth-failed", "layout-mismatch"), strict=True):
        prompt = random_prompt(100)
        params = pair.prefilled(prompt, engine.name)
        with pytest.raises(BenchError, match="answered 500"):
            complete(engine, prompt, kv_transfer_params=params)
        assert reason in engine.log.read_text(errors="replace")
        assert complete(engine, prompt).token_ids
    prompt = random_prompt(100)
    assert pair.decoded(prompt, "own", pair.prefilled(prompt, "own")).token_ids == pair.expected(prompt)
    pair.wait_empty(LEASE_TTL_S + 20)


def test_engines_are_killed_and_replaced_one_after_the_other(pair: Engines, replacements: Two) -> None:
    prompt = random_prompt(300)
    params = pair.prefilled(prompt, "killed")
    pair.prefill.signal(signal.SIGKILL)
    assert pair.decoded(prompt, "killed", params).token_ids == pair.expected(prompt)
    another, another_decode = replacements
    new = complete(another, prompt, 1, request_id="new", kv_transfer_params=TO_PREFILL)
    assert new.kv_transfer_params
    pair.decode.client.post("/reset_prefix_cache").raise_for_status()
    brought = pair.decode.prompt_tokens("external_kv_transfer")
    assert pair.decoded(prompt, "new", new.kv_transfer_params).token_ids == pair.expected(prompt)
    assert pair.decode.prompt_tokens("external_kv_transfer") > brought
    # Now decode dies while it fetches, or before, or after.
    long = [random_prompt(900, seed=at) for at in range(4)]
    handed = [
        complete(another, prompt, 1, kv_transfer_params=TO_PREFILL).kv_transfer_params for prompt in long
    ]
    with ThreadPoolExecutor(len(long)) as threads:
        asked = [
            threads.submit(complete, pair.decode, prompt, 200, kv_transfer_params=params)
            for prompt, params in zip(long, handed, strict=True)
        ]
        # The moment of the fault.
        time.sleep(0.05)
        pair.decode.signal(signal.SIGKILL)
        assert all(answer.exception() is not None for answer in asked)
    replaced = Engines(pair.alone, another, another_decode, pair.router, pair.observed)
    replaced.wait_empty(LEASE_TTL_S + 20)
    prompt = random_prompt(100)
    params = replaced.prefilled(prompt, "replaced")
    assert replaced.decoded(prompt, "replaced", params).token_ids == pair.expected(prompt)
    replaced.wait_empty()
