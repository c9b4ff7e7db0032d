"""Caches of other kinds: windows with block tables of their own, a latent for all heads, divided heads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from kvxfer.bench import tiny_models
from kvxfer.bench.vllm_server import VllmServer, complete
from tests.vllm.early_start import started
from tests.vllm.engine import TO_PREFILL, Engines, push, random_prompt, ranks_of, server

# Around a block, around a window of 64, and far beyond it.
LENGTHS = (20, 64, 70, 96, 130, 500)
# Each length in one of the two ways; in the other at night.
CASES = [
    pytest.param(length, how, marks=() if (at + (how == "push")) % 2 == 0 else pytest.mark.slow)
    for at, length in enumerate(LENGTHS)
    for how in ("pull", "push")
]


@pytest.fixture(params=["pull", "push"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def handed_over(
    prefill: VllmServer, decode: VllmServer, prompt: str, how: str = "pull"
) -> tuple[list[int], int]:
    """Returns the tokens of a pair, and how many of the prompt's came from the prefill engine."""
    before = decode.prompt_tokens("external_kv_transfer")
    if how == "push":
        tokens = push(prefill, decode, prompt, ranks_of(prefill)).token_ids
    else:
        params = complete(prefill, prompt, 1, kv_transfer_params=TO_PREFILL).kv_transfer_params
        tokens = complete(decode, prompt, kv_transfer_params=params).token_ids
    return tokens, decode.prompt_tokens("external_kv_transfer") - before


@contextmanager
def start_pair(model: str, folder: Path) -> Iterator[tuple[VllmServer, VllmServer]]:
    weights = tiny_models.save(model, folder / "model")
    with (
        server("prefill", weights, folder, "kv_producer") as prefill,
        server("decode", weights, folder, "kv_consumer") as decode,
    ):
        yield prefill, decode


windows = started("windows", partial(start_pair, "gemma3"))
latents = started("latents", partial(start_pair, "deepseek"))


@pytest.mark.parametrize(("length", "how"), CASES)
def test_windows(windows: tuple[VllmServer, VllmServer], length: int, how: str) -> None:
    prefill, decode = windows
    prompt = random_prompt(length)
    tokens, brought = handed_over(prefill, decode, prompt, how)
    assert brought >= length - 1
    assert tokens == complete(prefill, prompt).token_ids
    assert len(set(tokens)) > 4


def test_a_window_that_prefill_has_left_is_computed_by_decode(
    windows: tuple[VllmServer, VllmServer], how: str
) -> None:
    # The last token of a prompt looks at one that prefill has given back when it has ended: the last
    # of a block. In a push it was written before.
    prefill, decode = windows
    prompt = random_prompt(64 + 32 * 4 - 1)
    tokens, brought = handed_over(prefill, decode, prompt, how)
    assert tokens == complete(prefill, prompt).token_ids
    assert brought >= len(prompt) - 1 if how == "push" else brought == 0


def test_latents_arrive_as_they_left(latents: tuple[VllmServer, VllmServer]) -> None:
    # vLLM's CPU kernels for latents give other tokens where a token is decoded than where it is
    # prefilled, in one engine alone: so pages are compared, and that tokens were not computed anew.
    prefill, decode = latents
    for at, length in enumerate(LENGTHS):
        _, brought = handed_over(prefill, decode, random_prompt(length), ("pull", "push")[at % 2])
        assert brought >= length - 1
    observed = prefill.log.parent / "observed"
    pages = {
        what: {path.stem: path.read_text() for path in observed.glob(f"*.{what}")}
        for what in ("sent", "received")
    }
    received = pages["received"]
    # `ranks_of` asks prefill for a prompt that nobody fetches.
    assert {name: pages["sent"][name] for name in received} == received
    assert len(received) == len(LENGTHS)


def start_two_ranks(folder: Path) -> VllmServer:
    """The session's model with its heads divided among two workers, as prefill and as decode."""
    weights = tiny_models.save("llama", folder / "model")
    return server("two-ranks", weights, folder, "kv_both", arguments=["--tensor-parallel-size", "2"])


two_ranks = started("two_ranks", start_two_ranks)


@pytest.mark.parametrize(("length", "how"), CASES)
def test_heads_divide(engines: Engines, two_ranks: VllmServer, length: int, how: str) -> None:
    prompt = random_prompt(length)
    tokens, brought = handed_over(engines.prefill, two_ranks, prompt, how)
    assert tokens == engines.expected(prompt)
    assert brought >= length - 1


@pytest.mark.parametrize(("length", "how"), CASES)
def test_heads_meet(engines: Engines, two_ranks: VllmServer, length: int, how: str) -> None:
    prompt = random_prompt(length)
    tokens, brought = handed_over(two_ranks, engines.decode, prompt, how)
    assert tokens == engines.expected(prompt)
    assert brought >= length - 1
