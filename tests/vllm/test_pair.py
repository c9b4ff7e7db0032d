"""A prefill and a decode engine behind a router answer as one engine does."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvxfer.bench.engines.vllm_server import TOKENS_PER_BLOCK, complete, completion_request
from tests.vllm.engine import Engines

TEXT = "Pages of a request lie in every layer, and all of them must be where decode looks for them. " * 10


@pytest.mark.parametrize(
    "num_tokens",
    [2, TOKENS_PER_BLOCK - 1, TOKENS_PER_BLOCK, TOKENS_PER_BLOCK + 1, 8 * TOKENS_PER_BLOCK, 900],
)
@pytest.mark.smoke
def test_tokens_are_those_of_one_engine(engines: Engines, num_tokens: int) -> None:
    prompt = f"{num_tokens} {TEXT}"[:num_tokens]
    moved = engines.decode.prompt_tokens("external_kv_transfer")
    answer = complete(engines.router, prompt)
    assert answer.token_ids == engines.expected(prompt)
    # The same tokens would come out if decode had computed the prompt by itself.
    assert engines.decode.prompt_tokens("external_kv_transfer") - moved >= num_tokens - TOKENS_PER_BLOCK


def test_tokens_hang_on_the_prompt_and_vary(engines: Engines) -> None:
    first, second = engines.expected("a" + TEXT[:300]), engines.expected("b" + TEXT[:300])
    assert len(set(first)) > 8
    assert first != second


def test_many_requests_at_once_each_get_their_own_tokens(engines: Engines) -> None:
    prompts = [f"{number} at once. {TEXT}"[: 40 + 37 * number] for number in range(12)]
    moved = engines.decode.prompt_tokens("external_kv_transfer")
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: complete(engines.router, prompt).token_ids, prompts))
    assert answers == [engines.expected(prompt) for prompt in prompts]
    least = sum(len(prompt) - TOKENS_PER_BLOCK for prompt in prompts)
    assert engines.decode.prompt_tokens("external_kv_transfer") - moved >= least


def test_a_prompt_whose_beginning_decode_holds_moves_the_rest(engines: Engines) -> None:
    beginning = "Held. " + TEXT[:250]
    complete(engines.router, beginning)
    moved = engines.decode.prompt_tokens("external_kv_transfer")
    prompt = beginning + "And here it goes on, for some blocks more than before. " * 3
    assert complete(engines.router, prompt).token_ids == engines.expected(prompt)
    moved = engines.decode.prompt_tokens("external_kv_transfer") - moved
    assert 0 < moved < len(prompt) - 200


def test_the_same_prompt_again_is_answered_alike(engines: Engines) -> None:
    prompt = "Again. " + TEXT[:200]
    answers = [complete(engines.router, prompt).token_ids for _ in range(3)]
    assert answers == [engines.expected(prompt)] * 3


def test_streamed_text_is_the_whole_text(engines: Engines) -> None:
    prompt = "Streamed. " + TEXT[:100]
    request = completion_request(prompt, stream=True)
    with engines.router.client.stream("POST", "/v1/completions", **request) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events.pop() == "[DONE]"
    pieces = [json.loads(event)["choices"][0] for event in events]
    assert len(pieces) > 1
    assert [token for piece in pieces for token in piece["token_ids"]] == engines.expected(prompt)


def test_chat_is_handed_over_too(engines: Engines) -> None:
    request = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Chat. " + TEXT[:120]}],
        "max_completion_tokens": 24,
        "temperature": 0,
    }
    moved = engines.decode.prompt_tokens("external_kv_transfer")
    answers = [
        server.client.post("/v1/chat/completions", json=request).raise_for_status().json()
        for server in (engines.router, engines.alone)
    ]
    together, alone = (answer["choices"][0]["message"]["content"] for answer in answers)
    assert together == alone
    assert engines.decode.prompt_tokens("external_kv_transfer") > moved


def test_more_requests_than_the_caches_have_blocks_for_all_go_through(engines: Engines) -> None:
    # Pages that one side forgot to free would be missed: 16 requests of 29 blocks, and 256 blocks.
    for number in range(16):
        prompt = f"{number} of many. {TEXT}"[:900]
        assert complete(engines.router, prompt, 2).token_ids == engines.expected(prompt, 2)
    for server in (engines.prefill, engines.decode):
        assert server.num_requests() == 0
