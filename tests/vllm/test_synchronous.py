"""Loads that a forward waits for, layer by layer: between worker halves, and in an engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from kvxfer.bench.engines import tiny_models
from kvxfer.bench.engines.vllm_server import VllmServer, complete
from kvxfer.bench.errors import BenchError
from tests.vllm.engine import Engines, random_prompt, ranks_of, server
from tests.vllm.workers import LAYERS, Pushed, some_tokens, workers

TOKENS = 100


def test_a_forward_waits_for_the_layer_that_it_needs_and_no_other() -> None:
    pushed, whole = Pushed.draw("layers", TOKENS), some_tokens(TOKENS)
    with workers("prefill") as prefill, workers("decode") as decode:
        prefill[0].half.before_forward(pushed.chunk(0, TOKENS))
        has_computed = [threading.Event() for _ in LAYERS]
        may_go_on = [threading.Event() for _ in LAYERS]

        def compute() -> None:
            for layer, name in enumerate(LAYERS):
                while not may_go_on[layer].wait(0.01):
                    prefill[0].half.collect(set())  # reads decode's registration
                pushed.compute(prefill, layer, 0, TOKENS, whole)
                has_computed[layer].set()
                prefill[0].half.layer_done(name)
            prefill[0].half.after_forward(whole=True)

        forward = threading.Thread(target=compute)
        forward.start()
        decode[0].half.step(pushed.order(prefill, waits=True))
        for layer, name in enumerate(LAYERS):
            assert not has_computed[layer].is_set()
            may_go_on[layer].set()
            decode[0].half.wait_for_layer(name)
            assert torch.equal(pushed.arrived(decode, layer), whole[layer])
        forward.join(20)
        results = decode[0].half.collect(set())
        # Nobody waits to hear of it: the request runs.
        assert not results.received
        assert not results.failed


def test_what_did_not_arrive_is_told_with_its_step() -> None:
    pushed = Pushed.draw("gone", TOKENS)
    with workers("prefill") as prefill, workers("decode", load_timeout_s=1.0, push_timeout_s=1.0) as decode:
        decode[0].half.step(pushed.order(prefill, waits=True))
        for name in LAYERS:
            decode[0].half.wait_for_layer(name)
        results = decode[0].half.collect(set())
        assert not results.received
        assert results.failed == {"gone": set(pushed.dst)}


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
