"""Every kind of cache between engines that divide the heads differently, in pull and in push."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvxfer.bench.engines.vllm_server import VllmServer, complete
from tests.vllm import tiny_models
from tests.vllm.engine import TO_PREFILL, random_prompt, server
from tests.vllm.fp8_attention import ARGUMENTS as FP8_ARGUMENTS
from tests.vllm.fp8_attention import attention_of
from tests.vllm.gdn_attention import float32_states
from tests.vllm.handover import assert_flipped_bits_change_the_tokens, assert_handed_over
from tests.vllm.plugins import plugin
from tests.waiting import until

# Two engines for each model; one of them has two workers.
pytestmark = pytest.mark.slow

#: A model, or a Llama's cache in fp8, on one worker and on two; either may be prefill or decode.
Both = tuple[VllmServer, VllmServer]


@pytest.fixture(scope="module", params=["gemma3", "deepseek", "qwen3-next", "fp8"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp(request.param)
    weights = tiny_models.save("llama" if request.param == "fp8" else request.param, folder / "model")
    arguments = FP8_ARGUMENTS if request.param == "fp8" else ()
    two_workers = ("--tensor-parallel-size", "2")
    options: dict[str, Any] = {"lease_ttl_s": 10.0}
    if request.param == "fp8":
        options["environment"] = attention_of(folder)
    elif request.param == "qwen3-next":
        options["environment"] = plugin(float32_states, folder)
    with (
        server("one", weights, folder, "kv_both", arguments=arguments, **options) as one,
        server("two", weights, folder, "kv_both", arguments=[*arguments, *two_workers], **options) as two,
    ):
        yield one.wait_ready(), two.wait_ready()


# Around a block, around a window of 64, and far beyond it; blocks of states are larger.
@pytest.mark.parametrize("length", [20, 64, 70, 96, 130, 289, 577])
@pytest.mark.parametrize("how", ["pull", "push"])
@pytest.mark.parametrize("divide", [True, False], ids=["TP1 to TP2", "TP2 to TP1"])
def test_every_head_is_where_it_belongs(both: Both, divide: bool, how: str, length: int) -> None:
    prefill, decode = both if divide else reversed(both)
    assert_handed_over(prefill, decode, random_prompt(length), how)


def test_what_two_workers_keep_is_one_request(both: Both) -> None:
    _, two = both
    for at in range(3):
        complete(two, random_prompt(70, at), 1, kv_transfer_params=TO_PREFILL)
    until_kept(two, 3)
    until_kept(two, 0)  # their time is over


def until_kept(server: VllmServer, count: int) -> None:
    until(lambda: server.metric("vllm:kvxfer_kept_requests") == count, f"{count} kept at {server.name}")


def test_what_arrives_is_what_decode_goes_on_from(both: Both) -> None:
    assert_flipped_bits_change_the_tokens(*both, random_prompt(100))
