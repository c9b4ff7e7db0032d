"""A prefill and a decode server behind SGLang's router answer as one server does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvxfer.bench.engines.sglang_server import TOKENS_PER_PAGE, generate, generate_request
from tests.sglang import latent_attention
from tests.sglang.engine import CHUNK, Engines, Router, Server, Trio, handed_over, random_prompt, server
from tests.sglang.observed import FLIP
from tests.vllm import tiny_models

TEXT = "Pages of a request lie in every layer, and all of them must be where decode looks for them. " * 10


def num_pages(num_tokens: int) -> int:
    return -(-num_tokens // TOKENS_PER_PAGE)


@pytest.fixture(scope="module")
def decode_of_two(
    engines: Engines, weights: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A decode of two workers, each with half of the heads, that keeps the pages of earlier requests."""
    folder = tmp_path_factory.mktemp("two")
    arguments = ("--tp-size", "2", "--disaggregation-decode-enable-radix-cache")
    with server("decode", weights, folder, "decode", arguments=arguments) as decode:
        yield decode.wait_ready()


@pytest.mark.parametrize(
    "num_tokens",
    [2, TOKENS_PER_PAGE - 1, TOKENS_PER_PAGE, TOKENS_PER_PAGE + 1, CHUNK, CHUNK + 1, 900],
)
@pytest.mark.smoke
def test_tokens_are_those_of_one_server(engines: Engines, num_tokens: int) -> None:
    prompt = f"{num_tokens} {TEXT}"[:num_tokens]
    before = engines.decode.num_pages_arrived()
    assert generate(engines.router, prompt).token_ids == engines.expected(prompt)
    assert engines.decode.num_pages_arrived() - before == num_pages(num_tokens)


def test_tokens_hang_on_the_prompt_and_vary(engines: Engines) -> None:
    first, second = engines.expected("a" + TEXT[:300]), engines.expected("b" + TEXT[:300])
    assert len(set(first)) > 8
    assert first != second


def test_a_flipped_byte_changes_the_tokens(engines: Engines) -> None:
    prompt = random_prompt(100, "flipped")
    flip = engines.decode.observed / FLIP
    flip.touch()
    try:
        tokens, arrived = handed_over(engines.prefill, engines.decode, prompt)
    finally:
        flip.unlink()
    assert arrived == num_pages(100)
    assert tokens != engines.expected(prompt)
    assert handed_over(engines.prefill, engines.decode, prompt)[0] == engines.expected(prompt)


@pytest.mark.parametrize("num_tokens", [TOKENS_PER_PAGE + 1, 600])
def test_decode_of_two_workers_says_the_same(
    engines: Engines, decode_of_two: Server, num_tokens: int
) -> None:
    prompt = random_prompt(num_tokens, "two")
    tokens, arrived = handed_over(engines.prefill, decode_of_two, prompt)
    assert tokens == engines.expected(prompt)
    # Each worker has its heads of every page.
    assert arrived == 2 * num_pages(num_tokens)


def test_what_decode_has_of_a_prompt_is_not_moved(engines: Engines, decode_of_two: Server) -> None:
    beginning = random_prompt(10 * TOKENS_PER_PAGE, "held")
    assert handed_over(engines.prefill, decode_of_two, beginning)[1] == 2 * 10
    prompt = beginning + random_prompt(100, "the rest")
    tokens, arrived = handed_over(engines.prefill, decode_of_two, prompt)
    assert tokens == engines.expected(prompt)
    assert arrived == 2 * (num_pages(len(prompt)) - 10)


@pytest.fixture(scope="module")
def of_latents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """A prefill and a decode of a small DeepSeek, whose cache has one latent for each token."""
    folder = tmp_path_factory.mktemp("latents")
    weights = tiny_models.save("deepseek", folder / "model")
    options: dict[str, Any] = {
        "functions": {latent_attention.NAME: latent_attention.ENTRY_POINT},
        # transformers' configuration lacks this field; all layers are dense.
        "arguments": ("--json-model-override-args", '{"moe_layer_freq": 1}'),
    }
    with (
        server("alone", weights, folder, **options) as alone,
        server("prefill", weights, folder, "prefill", **options) as prefill,
        server("decode", weights, folder, "decode", **options) as decode,
    ):
        yield Trio(alone.wait_ready(), prefill.wait_ready(), decode.wait_ready())


@pytest.mark.parametrize("num_tokens", [TOKENS_PER_PAGE + 1, 600])
def test_latents_give_the_tokens_of_one_server(of_latents: Trio, num_tokens: int) -> None:
    prompt = random_prompt(num_tokens, "latents")
    tokens, arrived = handed_over(of_latents.prefill, of_latents.decode, prompt)
    assert tokens == of_latents.expected(prompt)
    assert len(set(tokens)) > 8
    assert arrived == num_pages(num_tokens)


def test_many_requests_at_once_each_get_their_own_tokens(engines: Engines) -> None:
    prompts = [f"{number} at once. {TEXT}"[: 40 + 37 * number] for number in range(12)]
    before = engines.decode.num_pages_arrived()
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: generate(engines.router, prompt).token_ids, prompts))
    assert answers == [engines.expected(prompt) for prompt in prompts]
    assert engines.decode.num_pages_arrived() - before == sum(num_pages(len(prompt)) for prompt in prompts)


def test_more_requests_than_the_caches_have_pages_for_all_go_through(engines: Engines) -> None:
    # Pages that one side forgot to free would be missed: 20 requests of 57 pages, and 512 pages.
    for number in range(20):
        prompt = f"{number} of many. {TEXT}"[:900]
        assert generate(engines.router, prompt, 2).token_ids == engines.expected(prompt, 2)


def test_streamed_text_is_the_whole_text(engines: Engines) -> None:
    prompt = "Streamed. " + TEXT[:100]
    with engines.router.client.stream(
        "POST", "/generate", json=generate_request(prompt, stream=True)
    ) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events.pop() == "[DONE]"
    assert len(events) > 1
    assert json.loads(events[-1])["output_ids"] == engines.expected(prompt)


def test_chat_is_handed_over_too(engines: Engines) -> None:
    request = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Chat. " + TEXT[:120]}],
        "max_completion_tokens": 24,
        "temperature": 0,
    }
    before = engines.decode.num_pages_arrived()
    answers = [
        one.client.post("/v1/chat/completions", json=request).raise_for_status().json()
        for one in (engines.router, engines.alone)
    ]
    together, alone = (answer["choices"][0]["message"]["content"] for answer in answers)
    assert together == alone
    assert engines.decode.num_pages_arrived() > before


def test_small_load_balancer_of_sglang_serves_as_well(engines: Engines, tmp_path: Path) -> None:
    prompt = random_prompt(200, "mini")
    with Router([engines.prefill], [engines.decode], tmp_path / "mini.log", mini=True) as router:
        before = engines.decode.num_pages_arrived()
        assert generate(router.wait_ready(), prompt).token_ids == engines.expected(prompt)
    assert engines.decode.num_pages_arrived() - before == num_pages(200)
