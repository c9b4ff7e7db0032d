"""Requests for several samples, and others that an engine splits: no block stays held."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from kvxfer.bench.engines.server_process import RouterServer, ServerProcess
from kvxfer.bench.engines.vllm_server import TOKENS_PER_BLOCK, complete, completion_request
from tests.seeds import seed_of
from tests.vllm.engine import TO_PREFILL, Engines, random_prompt

#: Each sample has its own seed, derived from the request's.
SAMPLED: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": seed_of("samples")}
EXPIRED = "not all of its readers finished"


@pytest.fixture(scope="module", params=["sequential", "concurrent"])
def router(engines: Engines, request: pytest.FixtureRequest) -> Iterator[RouterServer]:
    """A router before the pair that pulls or pushes."""
    log = engines.observed.parent / f"samples-{request.param}.log"
    with RouterServer([engines.prefill.url], [engines.decode.url], log, request.param) as router:
        router.wait_ready()
        # The first request tells it where prefill's agents are.
        complete(router, random_prompt(10), 1)
        yield router


def samples(server: ServerProcess, prompt: str | list[str], **fields: Any) -> list[list[int]]:
    """Returns the tokens of each choice, in their order."""
    answer = server.client.post("/v1/completions", **completion_request(prompt, 24, **fields))
    assert answer.is_success, answer.text
    choices = sorted(answer.json()["choices"], key=lambda choice: int(choice["index"]))
    return [choice["token_ids"] for choice in choices]


def moved(engines: Engines) -> int:
    return engines.decode.prompt_tokens("external_kv_transfer")


@pytest.fixture
def nothing_expires(engines: Engines) -> Iterator[None]:
    """Asserts that the engines gave back all blocks of a test because they were read."""
    engines.wait_empty()  # blocks that other tests left expire first
    before = engines.prefill.log.read_text(errors="replace").count(EXPIRED)
    yield
    engines.wait_empty()
    assert engines.prefill.log.read_text(errors="replace").count(EXPIRED) == before


@pytest.mark.usefixtures("nothing_expires")
@pytest.mark.parametrize("length", [20, 70, 500])
def test_all_samples_go_on_from_one_cache(engines: Engines, router: RouterServer, length: int) -> None:
    prompt = random_prompt(length)
    before, held = moved(engines), engines.decode.prompt_tokens("local_cache_hit")
    answers = samples(router, prompt, **SAMPLED)
    assert answers == samples(engines.alone, prompt, **SAMPLED)
    assert len({tuple(tokens) for tokens in answers}) == 3
    # The prompt is fetched once, and the other samples use its whole blocks.
    assert length - 1 <= moved(engines) - before <= length
    whole = (length - 1) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
    assert engines.decode.prompt_tokens("local_cache_hit") - held == 2 * whole


@pytest.mark.usefixtures("nothing_expires")
@pytest.mark.parametrize("fields", [{}, {**SAMPLED, "n": 2}], ids=["greedy", "sampled"])
def test_prompts_that_come_in_one_request_are_all_brought(
    engines: Engines, router: RouterServer, fields: dict[str, Any]
) -> None:
    prompts = [random_prompt(length) for length in (20, 70, 500)]
    before = moved(engines)
    answers = samples(router, prompts, **fields)
    assert answers == samples(engines.alone, prompts, **fields)
    num_tokens = sum(map(len, prompts))
    assert num_tokens - len(prompts) <= moved(engines) - before <= num_tokens


@pytest.mark.usefixtures("nothing_expires")
def test_prefill_that_is_asked_for_samples_hands_over_one(engines: Engines) -> None:
    # Routers that pass `n` on.
    prompt = random_prompt(200)
    answer = complete(engines.prefill, prompt, 1, **{**SAMPLED, "n": 4}, kv_transfer_params=TO_PREFILL)
    assert answer.kv_transfer_params
    before = moved(engines)
    answers = samples(engines.decode, prompt, kv_transfer_params=answer.kv_transfer_params, **SAMPLED)
    assert answers == samples(engines.alone, prompt, **SAMPLED)
    assert moved(engines) - before == len(prompt)


@pytest.mark.usefixtures("nothing_expires")
def test_prefill_that_is_asked_for_samples_pushes_one(engines: Engines) -> None:
    prompt, first = random_prompt(200), random_prompt(40)
    params = engines.prefilled(first, "first")
    engines.decoded(first, "first", params, 1)
    own, ranks = {"version": 1, "push": secrets.token_hex(16)}, params["kvxfer"]["ranks"]
    before = moved(engines)
    with ThreadPoolExecutor(2) as threads:
        prefill = threads.submit(
            complete, engines.prefill, prompt, 1, kv_transfer_params={**TO_PREFILL, "kvxfer": own}, **SAMPLED
        )
        params = {"do_remote_prefill": True, "kvxfer": {**own, "ranks": ranks}}
        answers = samples(engines.decode, prompt, kv_transfer_params=params, **SAMPLED)
        assert prefill.result().kv_transfer_params
    assert answers == samples(engines.alone, prompt, **SAMPLED)
    assert moved(engines) - before >= len(prompt) - 1


@pytest.mark.usefixtures("nothing_expires")
def test_samples_of_a_chat_are_handed_over_too(engines: Engines, router: RouterServer) -> None:
    request = {
        "model": "tiny",
        "messages": [{"role": "user", "content": random_prompt(120)}],
        "max_completion_tokens": 24,
        **SAMPLED,
    }
    before = moved(engines)
    together, alone = (
        [
            choice["message"]["content"]
            for choice in server.client.post("/v1/chat/completions", json=request)
            .raise_for_status()
            .json()["choices"]
        ]
        for server in (router, engines.alone)
    )
    assert together == alone
    assert len(set(together)) == 3
    assert moved(engines) - before >= 120


@pytest.mark.usefixtures("nothing_expires")
def test_streamed_samples_are_the_whole_ones(engines: Engines, router: RouterServer) -> None:
    prompt = random_prompt(150)
    request = completion_request(prompt, 24, stream=True, **SAMPLED)
    answers: list[list[int]] = [[], [], []]
    with router.client.stream("POST", "/v1/completions", **request) as answer:
        for line in answer.iter_lines():
            if line and not line.endswith("[DONE]"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    answers[choice["index"]] += choice["token_ids"]
    assert answers == samples(engines.alone, prompt, **SAMPLED)


@pytest.mark.usefixtures("nothing_expires")
def test_a_search_by_beams_is_computed_where_it_is_asked_for(engines: Engines, router: RouterServer) -> None:
    # The engine makes its own requests for it, without the parameters.
    prompt = random_prompt(100)
    fields: dict[str, Any] = {"n": 2, "use_beam_search": True}
    before = moved(engines)
    texts = [
        [
            choice["text"]
            for choice in server.client.post(
                "/v1/completions", **completion_request(prompt, 8, return_token_ids=False, **fields)
            )
            .raise_for_status()
            .json()["choices"]
        ]
        for server in (router, engines.alone)
    ]
    assert texts[0] == texts[1]
    assert moved(engines) == before


def test_a_handover_that_cannot_be_read_fails_all_its_samples(engines: Engines) -> None:
    prompt = random_prompt(100)
    params = engines.prefilled(prompt, "damaged")
    damaged = {**params, "kvxfer": {**params["kvxfer"], "prompt": "0" * 32}}
    request = completion_request(prompt, kv_transfer_params=damaged, **SAMPLED)
    assert engines.decode.client.post("/v1/completions", **request).status_code == 500
    engines.wait_empty()
    # Samples that arrived after it had failed have computed the prompt.
    engines.forget_prefixes()
    params = engines.prefilled(prompt, "next")
    before = moved(engines)
    answers = samples(engines.decode, prompt, kv_transfer_params=params, **SAMPLED)
    assert answers == samples(engines.alone, prompt, **SAMPLED)
    assert moved(engines) - before == len(prompt)


def test_samples_of_clients_that_go_away_leave_nothing_behind(engines: Engines, router: RouterServer) -> None:
    gone = 0
    for at in range(8):
        request = completion_request(random_prompt(900, seed=at), 200, **SAMPLED)
        try:
            httpx.post(f"{router.url}/v1/completions", timeout=0.02 + 0.05 * at, **request)
        except httpx.TimeoutException:
            gone += 1
    assert gone, "no answer took as long as 20 ms"
    engines.wait_empty(30)
    prompt = random_prompt(100)
    assert samples(router, prompt, **SAMPLED) == samples(engines.alone, prompt, **SAMPLED)


def test_of_several_samples_none_is_kept_for_a_later_turn(engines: Engines) -> None:
    # It is not known with which sample the conversation continues.
    prompt = random_prompt(100)
    params = {**engines.prefilled(prompt, "turn"), "do_remote_decode": True}
    answer = complete(engines.decode, prompt, kv_transfer_params=params, **SAMPLED)
    assert answer.kv_transfer_params is None
    engines.wait_empty()
