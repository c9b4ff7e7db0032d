"""Models whose caches are not one tensor of keys and values a layer: each as a pair of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvxfer.bench.vllm_server import TOKENS_PER_BLOCK, complete
from tests.vllm.engine import Engines, start_engines

TEXT = "Windows, latents and states: what a layer keeps of a request is not always its keys and values. " * 10


@pytest.fixture(scope="module", params=["gemma3", "deepseek", "qwen3-next"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Engines of one model; those of the one before have ended."""
    with contextmanager(start_engines)(request.param, tmp_path_factory.mktemp(request.param)) as engines:
        yield engines


# Within a block and a window, beyond a window of 64 tokens, and far beyond.
@pytest.mark.parametrize("num_tokens", [TOKENS_PER_BLOCK - 1, 3 * TOKENS_PER_BLOCK, 150, 850])
def test_tokens_of_other_caches_are_those_of_one_engine(pair: Engines, num_tokens: int) -> None:
    prompt = f"{num_tokens} {TEXT}"[:num_tokens]
    moved = pair.decode.prompt_tokens("external_kv_transfer")
    answer = complete(pair.router, prompt)
    assert answer.token_ids == pair.expected(prompt)
    assert pair.decode.prompt_tokens("external_kv_transfer") - moved >= num_tokens - TOKENS_PER_BLOCK
