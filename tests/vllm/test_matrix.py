"""Every kind of cache between engines whose heads are divided otherwise, in pull and in push."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvxfer.bench import tiny_models
from kvxfer.bench.vllm_server import VllmServer, complete
from tests.vllm.engine import FLIP, random_prompt, server
from tests.vllm.fp8_attention import ARGUMENTS as FP8_ARGUMENTS
from tests.vllm.fp8_attention import attention_of
from tests.vllm.gdn_attention import float32_states
from tests.vllm.plugins import plugin
from tests.vllm.test_models import handed_over

# Two engines a model, of which one has two workers.
pytestmark = pytest.mark.slow

# Around a block, around a window of 64, and far beyond it; blocks of states are larger.
_LENGTHS = (20, 64, 70, 96, 130, 289, 577)


@dataclass(frozen=True)
class Both:
    """A model, or a Llama's cache in fp8, on one worker and on two; either may be prefill or decode."""

    model: str
    one: VllmServer
    two: VllmServer
    observed: Path


@pytest.fixture(scope="module", params=["gemma3", "deepseek", "qwen3-next", "fp8"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp(request.param)
    weights = tiny_models.save("llama" if request.param == "fp8" else request.param, folder / "model")
    arguments = FP8_ARGUMENTS if request.param == "fp8" else ()
    options: dict[str, Any] = {"lease_ttl_s": 10.0}
    if request.param == "fp8":
        options["environment"] = attention_of(folder)
    elif request.param == "qwen3-next":
        options["environment"] = plugin(float32_states, folder)
    with (
        server("one", weights, folder, "kv_both", arguments=arguments, **options) as one,
        server(
            "two",
            weights,
            folder,
            "kv_both",
            arguments=[*arguments, "--tensor-parallel-size", "2"],
            **options,
        ) as two,
    ):
        yield Both(request.param, one.wait_ready(), two.wait_ready(), folder / "observed")


@pytest.mark.parametrize("how", ["pull", "push"])
@pytest.mark.parametrize("divide", [True, False], ids=["TP1 to TP2", "TP2 to TP1"])
def test_every_head_is_where_it_belongs(both: Both, divide: bool, how: str) -> None:
    prefill, decode = (both.one, both.two) if divide else (both.two, both.one)
    before = set(both.observed.glob("*.received"))
    for length in _LENGTHS:
        prompt = random_prompt(length)
        tokens, brought = handed_over(prefill, decode, prompt, how)
        assert brought >= length - 1
        assert tokens == complete(prefill, prompt).token_ids
    received = set(both.observed.glob("*.received")) - before
    assert len(received) == len(_LENGTHS)
    for path in received:
        arrived, left = heads_of(path), heads_of(path.with_suffix(".sent"))
        # Decode takes no block for what a window has left behind, and has one for tokens to come.
        both_have = arrived.keys() & left.keys()
        assert both_have
        for block in both_have:
            if both.model == "deepseek":  # whole on every worker, of which one is asked
                assert set(arrived[block]) <= set(left[block])
            else:
                assert arrived[block] == left[block]


def heads_of(path: Path) -> dict[tuple[int, int], tuple[str, ...]]:
    """Returns, by group and place in its table, the hashes of a block's heads: one worker after the other."""
    ranks = [json.loads(each.read_text()) for each in sorted(path.parent.glob(f"{path.name}*"))]
    return {
        (group, at): tuple(dict.fromkeys(head for rank in ranks for head in rank[group][at]))
        for group, blocks in enumerate(ranks[0])
        for at, heads in enumerate(blocks)
        if heads
    }


def test_what_arrives_is_what_decode_goes_on_from(both: Both) -> None:
    prompt = random_prompt(_LENGTHS[1])
    tokens, _ = handed_over(both.one, both.two, prompt)
    flip = both.observed / FLIP
    flip.write_text("tokens")
    try:
        both.two.client.post("/reset_prefix_cache").raise_for_status()
        assert handed_over(both.one, both.two, prompt)[0] != tokens
    finally:
        flip.unlink()
        both.two.client.post("/reset_prefix_cache").raise_for_status()
