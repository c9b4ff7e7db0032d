"""Data-parallel ranks behind one front end: each is a separate engine with its own agents."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvxfer.bench.engines import tiny_models
from kvxfer.bench.engines.server_process import RouterServer, ServerProcess
from kvxfer.bench.engines.vllm_server import VllmServer, complete, completion_request
from tests.vllm.engine import TO_PREFILL, Engines, random_prompt, server
from tests.vllm.test_proxies import PROXIES

pytestmark = pytest.mark.slow

NUM_RANKS = 2
LENGTH = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data-parallel")


@pytest.fixture(scope="module")
def ranks(engines: Engines, folder: Path) -> Iterator[VllmServer]:
    """The session's model on two data-parallel ranks, as prefill and as decode."""
    weights = tiny_models.save("llama", folder / "model")
    options: dict[str, Any] = {
        "arguments": ["--data-parallel-size", str(NUM_RANKS)],
        "lease_ttl_s": 30.0,
        # During its import, prometheus_client reads whether several front ends count together.
        "forked": False,
    }
    with server("ranks", weights, folder, "kv_both", **options) as engine:
        yield engine.wait_ready()


def places(engine: VllmServer) -> list[str]:
    """Returns the addresses of its ranks, for a router."""
    return [f"{engine.url}#{rank}" for rank in range(NUM_RANKS)]


def wait_empty(engines: Engines, ranks: VllmServer) -> None:
    Engines(engines.alone, ranks, ranks, engines.router, engines.observed).wait_empty()
    engines.wait_empty()


def brought(decode: VllmServer) -> list[float]:
    """Returns how many prompt tokens each rank got from other engines."""
    return [
        decode.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer", engine=str(rank))
        for rank in range(NUM_RANKS)
    ]


@pytest.mark.parametrize("roles", ["many to one", "one to many", "many to many"])
def test_each_hands_over_what_it_has_computed(engines: Engines, ranks: VllmServer, roles: str) -> None:
    prefill = engines.prefill if roles.startswith("one") else ranks
    decode = engines.decode if roles.endswith("one") else ranks
    names, before = set(), brought(ranks)
    for number in range(2 * NUM_RANKS):
        prompt = random_prompt(LENGTH, seed=number)
        expected, moved = engines.expected(prompt), decode.prompt_tokens("external_kv_transfer")
        params = complete(prefill, prompt, 1, kv_transfer_params=TO_PREFILL).kv_transfer_params
        assert params
        (agent,) = params["kvxfer"]["ranks"]
        # A worker's agent has its engine's name, and no two have the same name.
        assert agent["name"].startswith(f"{params['remote_engine_id']}/0.")
        names.add((agent["name"], agent["address"]))
        headers = {"X-data-parallel-rank": str(number % NUM_RANKS)} if decode is ranks else {}
        request = completion_request(prompt, kv_transfer_params=params)
        request["headers"] |= headers
        answer = decode.client.post("/v1/completions", **request).raise_for_status().json()
        assert answer["choices"][0]["token_ids"] == expected
        moved = decode.prompt_tokens("external_kv_transfer") - moved
        # A rank that has computed a prompt itself fetches nothing.
        is_own = decode is ranks and params["remote_engine_id"].endswith(f"_dp{number % NUM_RANKS}")
        assert moved == (0 if is_own else LENGTH)
    assert len(names) == (1 if prefill is engines.prefill else NUM_RANKS)
    if prefill is not ranks:
        assert all(now > then for then, now in zip(before, brought(ranks), strict=True))
    wait_empty(engines, ranks)


@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
@pytest.mark.parametrize("roles", ["many to one", "one to many"])
def test_many_at_once_through_a_router(
    engines: Engines, ranks: VllmServer, folder: Path, roles: str, dispatch: str
) -> None:
    prefills = [engines.prefill.url] if roles.startswith("one") else places(ranks)
    decode = engines.decode if roles.endswith("one") else ranks
    decodes = [decode.url] if decode is engines.decode else places(ranks)
    with RouterServer(prefills, decodes, folder / f"{roles}-{dispatch}.log", dispatch) as router:
        router.wait_ready()
        for _ in prefills:
            # The answer tells the router the addresses of its agents.
            complete(router, random_prompt(10), 1)
        before = decode.prompt_tokens("external_kv_transfer")
        prompts = [random_prompt(40 + 61 * number) for number in range(6)]
        with ThreadPoolExecutor(len(prompts)) as threads:
            answers = list(threads.map(lambda prompt: complete(router, prompt).token_ids, prompts))
    assert answers == [engines.expected(prompt) for prompt in prompts]
    moved = decode.prompt_tokens("external_kv_transfer") - before
    assert moved >= sum(len(prompt) - 1 for prompt in prompts)
    wait_empty(engines, ranks)


def engine_id(engine: VllmServer, other: VllmServer) -> str:
    """Returns the name of the engine that answers; the prompt is handed over, so that nothing stays kept."""
    prompt = random_prompt(40)
    params = complete(engine, prompt, 1, kv_transfer_params=TO_PREFILL).kv_transfer_params
    assert params
    complete(other, prompt, 1, kv_transfer_params=params)
    return str(params["remote_engine_id"])


def test_engines_that_the_router_names_all_read_one_prompt(engines: Engines, ranks: VllmServer) -> None:
    """Even late ones: the second is asked after the first has answered."""
    names = [engine_id(engines.decode, engines.prefill), engine_id(ranks, engines.decode)]
    prompt = random_prompt(LENGTH)
    params = engines.prefilled(prompt, "forked", kvxfer={"version": 1, "readers": names})
    expected = engines.expected(prompt)
    for decode in (engines.decode, ranks):
        before = decode.prompt_tokens("external_kv_transfer")
        request = completion_request(prompt, kv_transfer_params=params)
        if decode is ranks:
            request["headers"] |= {"X-data-parallel-rank": names[1].rpartition("_dp")[2]}
        answer = decode.client.post("/v1/completions", **request).raise_for_status().json()
        assert answer["choices"][0]["token_ids"] == expected
        assert decode.prompt_tokens("external_kv_transfer") - before == LENGTH
    wait_empty(engines, ranks)
    assert not engines.has_expired("forked")


@pytest.mark.parametrize("dispatch", ["sequential", "concurrent", "vLLM's own proxy"])
def test_samples_that_the_front_end_spreads_are_all_brought(
    engines: Engines, ranks: VllmServer, folder: Path, dispatch: str, seed: int
) -> None:
    router: ServerProcess
    if dispatch in ("sequential", "concurrent"):
        log = folder / f"spread-{dispatch}.log"
        router = RouterServer([engines.prefill.url], [ranks.url], log, dispatch)
    else:
        router = PROXIES["toy"].start(replace(engines, decode=ranks), folder, 0)
    with router:
        router.wait_ready()
        complete(router, random_prompt(10), 1)  # it tells the router where its agents are
        before = brought(ranks)
        prompts = [random_prompt(LENGTH, seed=number) for number in range(4)]
        requests = [completion_request(prompt, n=8, temperature=1.0, seed=seed) for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as threads:
            answers = [
                list(threads.map(lambda request: choices(each, request), requests))  # noqa: B023
                for each in (router, engines.alone)
            ]
        assert answers[0] == answers[1]
    # Asserts that every rank fetched something.
    assert all(now > then for then, now in zip(before, brought(ranks), strict=True))
    wait_empty(engines, ranks)


def choices(server: ServerProcess, request: dict[str, Any]) -> list[list[int]]:
    answer = server.client.post("/v1/completions", **request).raise_for_status().json()
    return [choice["token_ids"] for choice in answer["choices"]]


def test_samples_stay_together_where_the_router_names_their_rank(
    engines: Engines, ranks: VllmServer, folder: Path, seed: int
) -> None:
    with RouterServer([engines.prefill.url], places(ranks), folder / "samples.log") as router:
        router.wait_ready()
        for number in range(NUM_RANKS):
            prompt = random_prompt(LENGTH, seed=number)
            request = completion_request(prompt, n=3, temperature=1.0, seed=seed)
            answers = [
                [
                    choice["token_ids"]
                    for choice in each.client.post("/v1/completions", **request).json()["choices"]
                ]
                for each in (router, engines.alone)
            ]
            assert answers[0] == answers[1]
    wait_empty(engines, ranks)
