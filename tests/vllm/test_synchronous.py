"""Loads that a forward waits for, layer by layer: in an engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvxfer.bench.engines import tiny_models
from kvxfer.bench.engines.vllm_server import VllmServer, complete
from kvxfer.bench.errors import BenchError
from tests.vllm.engine import Engines, random_prompt, ranks_of, server


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A decode whose forwards wait for what they load."""
    folder = tmp_path_factory.mktemp("waiting")
    weights = tiny_models.save("llama", folder / "model")
    with server("waiting", weights, folder, "kv_consumer", loads="synchronous") as engine:
        yield engine.wait_ready()


@pytest.mark.parametrize("num_tokens", [2, 31, 32, 33, 300, 900])
def test_tokens_are_those_of_one_engine(engines: Engines, waiting: VllmServer, num_tokens: int) -> None:
    prompt = random_prompt(num_tokens)
    brought = waiting.prompt_tokens("external_kv_transfer")
    params = engines.prefilled(prompt, "waiting")
    assert complete(waiting, prompt, kv_transfer_params=params).token_ids == engines.expected(prompt)
    # The last token is computed, to sample from it.
    assert waiting.prompt_tokens("external_kv_transfer") - brought == num_tokens - 1


def test_a_load_that_fails_fails_its_request_alone(engines: Engines, waiting: VllmServer) -> None:
    prompt = random_prompt(100)
    params = engines.prefilled(prompt, "waiting-fails")
    params["kvxfer"]["leases"] = ["kvxfer-lease-1.4000000000000abc"]
    with pytest.raises(BenchError, match="answered 500"):
        complete(waiting, prompt, kv_transfer_params=params)
    assert complete(waiting, prompt).token_ids == engines.expected(prompt)
    assert ranks_of(engines.prefill)
